"""Scheduling and KV layout as policies; static and contiguous are for benchmarks only.

    ContinuousBatching   admit whenever a running slot and blocks are free
    StaticBatching       fill a batch, then admit nothing until all of it has ended
    PagedKV              a running sequence has the blocks of its tokens so far
    ContiguousKV         it has the blocks of its prompt and of all of `max_tokens`

The product is continuous and paged. `choose_policy` is called once, at start; the rest of the
engine is the same under every policy.
"""

from dataclasses import dataclass

from engine.config import EngineConfig
from engine.scheduling.sequence import Sequence


class ContinuousBatching:
    """Every step may admit."""

    allows_deferral = True

    def begin_step(self, *, is_batch_open: bool) -> None:
        """Nothing to prepare: there are no batches."""

    def may_admit(self) -> bool:
        """Return true."""
        return True

    def count_admission(self) -> None:
        """Nothing to count."""

    def end_step(self, *, is_full: bool) -> None:
        """Nothing to close."""


class StaticBatching:
    """A batch is filled over as many steps as its prompts take, and then run until it is empty."""

    allows_deferral = False  # a deferred sequence would wait for the end of the whole batch

    def __init__(self, max_num_seqs: int) -> None:
        """Start without a batch."""
        self._max_num_seqs = max_num_seqs
        self._num_left = 0

    def begin_step(self, *, is_batch_open: bool) -> None:
        """Open a batch if no sequence of the last one is running or preempted."""
        if not is_batch_open:
            self._num_left = self._max_num_seqs

    def may_admit(self) -> bool:
        """Return whether the batch is still being filled."""
        return self._num_left > 0

    def count_admission(self) -> None:
        """Count one admission into the batch."""
        self._num_left -= 1

    def end_step(self, *, is_full: bool) -> None:
        """Close the batch, unless only the step's token budget kept requests out of it."""
        if not is_full:
            self._num_left = 0


class PagedKV:
    """Blocks are allocated as a sequence grows."""

    def num_tokens_to_hold(self, sequence: Sequence) -> int:
        """Return for how many tokens a running sequence has blocks."""
        return sequence.num_tokens

    def num_growing(self, num_running: int) -> int:
        """Return how many of the running sequences may need another block."""
        return num_running


class ContiguousKV:
    """All blocks that a sequence can ever need are allocated at admission."""

    def num_tokens_to_hold(self, sequence: Sequence) -> int:
        """Return the prompt's length plus `max_tokens`."""
        return sequence.capacity

    def num_growing(self, num_running: int) -> int:
        """Return 0: no running sequence needs another block."""
        return 0


@dataclass(frozen=True, slots=True)
class Policy:
    """How sequences join the running batch, and how many blocks each of them has."""

    batching: ContinuousBatching | StaticBatching
    layout: PagedKV | ContiguousKV


def choose_policy(config: EngineConfig) -> Policy:
    """Return the policy that the configuration names."""
    is_static, is_paged = config.scheduling == "static", config.kv_layout == "paged"
    return Policy(
        StaticBatching(config.max_num_seqs) if is_static else ContinuousBatching(),
        PagedKV() if is_paged else ContiguousKV(),
    )
