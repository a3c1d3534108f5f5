"""What the engine says about one admitted request, in billing's own words."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal, get_args

from typing_extensions import TypeIs

from billing.meters import WritePoint

FailureReason = Literal["error", "engine_lost"]
FinishReason = Literal["stop_token", "max_tokens", "finished", "aborted", FailureReason]
GrantOutcome = Literal["granted", "refreshed", "refused"]


def is_failure(reason: FinishReason) -> TypeIs[FailureReason]:
    """Whether the engine, not the answer or the client, ended the request."""
    return reason in get_args(FailureReason)


@dataclass(frozen=True, slots=True)
class GrantFact:
    """The engine's answer to one breakpoint; `committed` once its prefix is pinned.

    `lease_id` names the lease that it made or refreshed; what that costs is in the lease's reports.
    """

    tokens: int
    write: bool
    outcome: GrantOutcome
    reason: str | None = None
    committed: bool = False
    lease_id: str | None = None


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """One engine record; the four facts (reused promised, gift, recomputed, computed) add up."""

    engine_boot_id: str
    finish_reason: FinishReason
    prompt_tokens: int
    tokens_reused_promised: int
    tokens_reused_gift: int
    tokens_read_recomputed: int
    tokens_computed: int
    grants: tuple[GrantFact, ...]
    output_tokens: int
    overrun_tokens: int = 0
    tokens_recomputed_preemption: int = 0
    num_preemptions: int = 0
    reads_by_tier: dict[str, int] = field(default_factory=dict)
    queued_ms: int = 0

    @property
    def read_tokens(self) -> int:
        """The prefix billed as a read, whether or not its KV survived."""
        return self.tokens_reused_promised + self.tokens_read_recomputed

    @property
    def prompt_accounted(self) -> int:
        """What the four facts add up to."""
        return self.read_tokens + self.tokens_reused_gift + self.tokens_computed


@dataclass(frozen=True, slots=True)
class RefusedWrite:
    """A breakpoint whose write the engine refused; its tokens are plain input."""

    tokens: int
    reason: str


def dump(values: Sequence[WritePoint | GrantFact | RefusedWrite]) -> str:
    """Small lists are stored as JSON text beside the row they explain."""
    return json.dumps([asdict(value) for value in values], separators=(",", ":"))


def load_writes(text: str) -> tuple[WritePoint, ...]:
    """The write points of a stored hold or request."""
    return tuple(WritePoint(**value) for value in json.loads(text))


def load_grants(text: str) -> tuple[GrantFact, ...]:
    """The grants of a stored engine record."""
    return tuple(GrantFact(**value) for value in json.loads(text))


def load_refused(text: str) -> tuple[RefusedWrite, ...]:
    """The refused writes of a stored request."""
    return tuple(RefusedWrite(**value) for value in json.loads(text))
