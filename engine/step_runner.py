"""StepRunner: runs steps on the runner; of a failed step it finds the rows that cannot be computed.

A failed step is run again in halves, down to single rows: what K and V it has written is written
again. So a row that cannot be computed fails alone.
"""

import logging
from collections import Counter
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from engine.errors import DeviceLost, StepsFailing
from engine.plan import BlockCopy, BlockLoad, Plan, Row, Runner
from engine.scheduling.sequence import Sequence
from engine.scheduling.step import Step

log = logging.getLogger(__name__)

# Steps in a row of which nothing could be computed, until the engine ends. A few failing requests,
# each alone in its step, should not end it; a device that computes nothing any more should, soon.
MAX_FAILED_STEPS = 8


@dataclass(slots=True)
class StepResult:
    """What a step computed.

    sampled   the token of each sequence whose row samples
    failed    the sequences that could not be computed, with the reason; nothing of them is valid
    """

    sampled: dict[Sequence, int] = field(default_factory=dict)
    failed: dict[Sequence, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Part:
    """A sequence's share of a step; one whose blocks are only filled has no row."""

    sequence: Sequence
    row: Row | None = None
    copies: list[BlockCopy] = field(default_factory=list)
    loads: list[BlockLoad] = field(default_factory=list)


class StepRunner:
    """Runs steps and counts those that fail."""

    def __init__(self, runner: Runner, counts: Counter[str]) -> None:
        """`counts` are the engine's counters, by name."""
        self._runner, self._counts = runner, counts
        self._num_failed_in_a_row = 0

    def run(self, step: Step) -> StepResult:
        """Execute a step, apart from its rows that fail.

        Raises DeviceLost as the runner does, and StepsFailing after MAX_FAILED_STEPS steps in a row
        of which nothing could be computed.
        """
        result = StepResult()
        owners = [sequence for (sequence, _), row in zip(step.scheduled, step.rows, strict=True)]
        try:
            self._execute(step.plan, owners, result)
        except DeviceLost:
            raise
        except Exception as error:
            log.exception("step_failed")
            self._counts["steps_failed_total"] += 1
            self._run_apart(_parts(step), error, result)
        self._require_progress(step, result)
        return result

    def _execute(self, plan: Plan, owners: Items[Sequence], result: StepResult) -> None:
        sampled = self._runner.execute(plan)
        sampling = [owner for owner, row in zip(owners, plan.rows, strict=True) if row.samples]
        assert len(sampled) == len(sampling), f"runner sampled {len(sampled)} of {len(sampling)}"
        for sequence, token in zip(sampling, sampled, strict=True):
            if token is None:
                log.error("logits_not_finite", extra={"request_id": sequence.request_id})
                self._counts["requests_not_finite_total"] += 1
                result.failed[sequence] = "The model computed no finite logits"
            else:
                result.sampled[sequence] = token

    def _run_apart(self, parts: Items[_Part], error: Exception, result: StepResult) -> None:
        """Execute the halves of parts that failed together with `error`; one alone has failed."""
        if len(parts) == 1:
            sequence, reason = parts[0].sequence, f"{type(error).__name__}: {error}"
            log.error("row_failed", extra={"request_id": sequence.request_id, "reason": reason})
            self._counts["rows_failed_total"] += 1
            result.failed[sequence] = f"The step failed: {reason}"
            return
        middle = len(parts) // 2
        for half in (parts[:middle], parts[middle:]):
            try:
                self._execute(*_plan(half), result)
            except DeviceLost:
                raise
            except Exception as half_error:  # noqa: BLE001 - it is reported with its row
                self._run_apart(half, half_error, result)

    def _require_progress(self, step: Step, result: StepResult) -> None:
        if any(sequence not in result.failed for sequence in step.members()):
            self._num_failed_in_a_row = 0
            return
        self._num_failed_in_a_row += 1
        if self._num_failed_in_a_row >= MAX_FAILED_STEPS:
            raise StepsFailing(self._num_failed_in_a_row, next(iter(result.failed.values())))


def _parts(step: Step) -> list[_Part]:
    parts = {sequence: _Part(sequence) for sequence in step.members()}
    for (sequence, _), row in zip(step.scheduled, step.rows, strict=True):
        parts[sequence].row = row
    # A block that is filled belongs to one sequence alone.
    owners = {block: sequence for sequence in step.filled for block in sequence.blocks}
    for copy in step.copies:
        parts[owners[copy.target]].copies.append(copy)
    for load in step.loads:
        parts[owners[load.blocks[-1]]].loads.append(load)
    return list(parts.values())


def _plan(parts: Items[_Part]) -> tuple[Plan, list[Sequence]]:
    with_rows = [(part.row, part.sequence) for part in parts if part.row is not None]
    plan = Plan(
        copies=tuple(copy for part in parts for copy in part.copies),
        rows=tuple(row for row, _ in with_rows),
        loads=tuple(load for part in parts for load in part.loads),
    )
    return plan, [sequence for _, sequence in with_rows]
