"""A step while it is being planned, and the plan that the runner gets of it."""

from dataclasses import dataclass, field

from engine.blocks.prefix_index import Match
from engine.plan import BlockCopy, BlockLoad, Plan, Row
from engine.scheduling.sequence import Sequence


@dataclass(slots=True)
class Step:
    """One step: what the runner is asked, and for whom.

    `scheduled` pairs each row's sequence with its number of new tokens; `admitted` are those that
    left the queue for the first time; `filled` are those into whose blocks the step copies or
    loads, with a row or, resumed beyond the budget, without; `restored` those of them whose match a
    stored lease lengthened. The step `is_open` while newcomers may be
    admitted. It `is_full` once it takes no more rows: its budget is used up, or the next prompt
    needs a step of its own.
    """

    scheduled: list[tuple[Sequence, int]] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    loads: list[BlockLoad] = field(default_factory=list)
    filled: list[Sequence] = field(default_factory=list)
    restored: list[tuple[Sequence, Match]] = field(default_factory=list)
    budget_left: int = 0
    is_full: bool = False
    is_open: bool = False

    def add(self, sequence: Sequence, num_new: int) -> None:
        """Let a sequence compute its next `num_new` tokens."""
        self.scheduled.append((sequence, num_new))
        self.rows.append(sequence.row(num_new))
        self.budget_left -= num_new
        self.is_full = self.budget_left <= 0

    def has_prompt(self) -> bool:
        """Whether some row computes more than one token."""
        return any(num_new > 1 for _, num_new in self.scheduled)

    def members(self) -> list[Sequence]:
        """Everyone whose blocks are not what they should be if the step fails."""
        scheduled = [sequence for sequence, _ in self.scheduled]
        return list(dict.fromkeys([*scheduled, *self.filled]))

    @property
    def plan(self) -> Plan:
        """The step in the runner's terms."""
        return Plan(tuple(self.copies), tuple(self.rows), tuple(self.loads))
