"""Engine facts: what billing keeps of the engine's record of one admitted request."""

from dataclasses import dataclass, field, fields
from typing import Literal, get_args

from typing_extensions import TypeIs

COUNTER_MAX = 2**53  # tokens or milliseconds; JSON readers count exactly up to here

FailureReason = Literal["error", "engine_lost"]
FinishReason = Literal["stop_token", "max_tokens", "finished", "aborted", FailureReason]
GrantOutcome = Literal["granted", "refreshed", "refused"]


def is_failure(reason: FinishReason) -> TypeIs[FailureReason]:
    """Whether the request ended because the engine failed."""
    return reason in get_args(FailureReason)


@dataclass(frozen=True, slots=True)
class GrantFact:
    """The engine's decision on one breakpoint; `committed` once its prefix is computed and pinned.

    `lease_id` is the lease that it made or refreshed.
    """

    num_tokens: int
    write: bool
    outcome: GrantOutcome
    reason: str | None = None
    committed: bool = False
    lease_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """One engine record. The first four numbers (the four facts) add up to `prompt_tokens`."""

    tokens_reused_promised: int
    tokens_reused_gift: int
    tokens_read_recomputed: int
    tokens_computed: int
    prompt_tokens: int
    output_tokens: int
    overrun_tokens: int = 0
    tokens_recomputed_preemption: int = 0
    num_preemptions: int = 0
    reads_by_tier: dict[str, int] = field(default_factory=dict)
    grants: tuple[GrantFact, ...]
    finish_reason: FinishReason
    queued_ms: int = 0
    engine_boot_id: str

    @property
    def read_tokens(self) -> int:
        """The prefix billed as a read, whether its KV was reused or computed again."""
        return self.tokens_reused_promised + self.tokens_read_recomputed

    @property
    def prompt_accounted(self) -> int:
        """The sum of the four facts."""
        return self.read_tokens + self.tokens_reused_gift + self.tokens_computed


def counter_out_of_range(facts: EngineFacts) -> str | None:
    """Return which counter of an engine record is negative or beyond any count, or None.

    The database would refuse such a row, and not say why in one sentence.
    """
    counters: dict[str, int] = {
        field.name: getattr(facts, field.name)
        for field in fields(facts)
        if isinstance(getattr(facts, field.name), int)
    }
    counters |= {f"reads from {tier}": tokens for tier, tokens in facts.reads_by_tier.items()}
    counters |= {f"grant {n}": grant.num_tokens for n, grant in enumerate(facts.grants)}
    for name, value in counters.items():
        if not 0 <= value <= COUNTER_MAX:
            return f"{name} is {value}"
    return None


@dataclass(frozen=True, slots=True)
class RefusedWrite:
    """A breakpoint whose write the engine refused; its tokens are plain input."""

    num_tokens: int
    reason: str
