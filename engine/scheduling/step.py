"""What the scheduler collects for the next step, then freezes into the runner's plan."""

from collections.abc import Container
from dataclasses import dataclass, field

from engine.blocks.prefix_index import Match
from engine.plan import BlockCopy, BlockLoad, Plan, Row
from engine.scheduling.sequence import Sequence


@dataclass(slots=True)
class Step:
    """One step: the runner's work, and the sequences that it is for.

    scheduled      each row's sequence with its number of new tokens
    admitted       sequences that left the queue for the first time
    filled         sequences into whose blocks the step copies or loads; a preempted one that starts
                   again may have no row, if the budget leaves no token for it
    restored       those of them that load a stored lease, with their matches
    budget_left    tokens that the step may still compute
    is_full        no more rows: the budget is used up, or the next prompt needs another step
    is_admitting   whether waiting sequences may be admitted
    admits_only    the one namespace whose sequences may; None: every namespace's
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
    is_admitting: bool = False
    admits_only: bytes | None = None

    def limit(self, num_tokens: int) -> None:
        """Let the step compute at most `num_tokens` more."""
        self.budget_left = min(self.budget_left, num_tokens)

    def add(self, sequence: Sequence, num_new: int) -> None:
        """Add a row that computes a sequence's next `num_new` tokens."""
        self.scheduled.append((sequence, num_new))
        self.rows.append(sequence.row(num_new))
        self.budget_left -= num_new
        self.is_full = self.budget_left <= 0

    def has_prompt(self) -> bool:
        """Return whether some row computes more than one token."""
        return any(num_new > 1 for _, num_new in self.scheduled)

    def members(self) -> list[Sequence]:
        """Return the sequences whose blocks are invalid if the step fails."""
        scheduled = [sequence for sequence, _ in self.scheduled]
        return list(dict.fromkeys([*scheduled, *self.filled]))

    def leave_out(self, sequences: Container[Sequence]) -> None:
        """Take out the rows of sequences that could not be computed, so that none is published."""
        kept = [i for i, (sequence, _) in enumerate(self.scheduled) if sequence not in sequences]
        self.scheduled = [self.scheduled[i] for i in kept]
        self.rows = [self.rows[i] for i in kept]
        self.restored = [restored for restored in self.restored if restored[0] not in sequences]

    @property
    def plan(self) -> Plan:
        """The step as the runner executes it."""
        return Plan(tuple(self.copies), tuple(self.rows), tuple(self.loads))
