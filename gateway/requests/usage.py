"""Usage numbers: the engine's record to billing's facts, billing's quantities to the wire."""

from dataclasses import dataclass, replace

from billing.facts import EngineFacts, GrantFact
from billing.holds import Hold
from billing.meters import Quantities, WritePoint, split
from engine.client import EngineRecord, Grant
from gateway.wire.events import DeltaUsage
from gateway.wire.response import CacheCreation, Usage


@dataclass(frozen=True, slots=True)
class CacheOutcome:
    """What became of a request's breakpoints: final from admission on."""

    quantities: Quantities
    refused: tuple[Grant, ...]

    @property
    def header(self) -> str:
        """The value of `x-kvmeter-cache`."""
        q = self.quantities
        parts = [
            f"read={q.cache_read}",
            f"write_5m={q.cache_write_5m}",
            f"write_1h={q.cache_write_1h}",
        ]
        if self.refused:
            refusals = ",".join(f"{grant.reason}@{grant.num_tokens}" for grant in self.refused)
            parts.append(f"refused={refusals}")
        return "; ".join(parts)


def granted_writes(hold: Hold, grants: tuple[Grant, ...]) -> tuple[WritePoint, ...]:
    """The writes that the engine did not refuse."""
    answers = {grant.num_tokens: grant for grant in grants if grant.write}
    return tuple(w for w in hold.writes if answers[w.tokens].outcome != "refused")


def cache_outcome(hold: Hold, grants: tuple[Grant, ...]) -> CacheOutcome:
    """Split the prompt by the writes that the engine granted; a refused one is plain input."""
    return CacheOutcome(
        quantities=split(
            total_tokens=hold.total_tokens,
            read_tokens=hold.read_tokens,
            writes=granted_writes(hold, grants),
        ),
        refused=tuple(grant for grant in grants if grant.write and grant.outcome == "refused"),
    )


def bill_up_to(record: EngineRecord, output_tokens: int | None) -> EngineRecord:
    """The record with what came after a stop string as overrun; None: there was no stop string.

    The gateway finds stop strings, and the engine may have ended the request before it heard.
    """
    if output_tokens is None:
        return record
    overrun_tokens = max(0, record.output_tokens - output_tokens)
    return replace(
        record,
        output_tokens=record.output_tokens - overrun_tokens,
        overrun_tokens=record.overrun_tokens + overrun_tokens,
    )


def engine_facts(record: EngineRecord) -> EngineFacts:
    """The engine's record in billing's own words."""
    return EngineFacts(
        engine_boot_id=record.engine_boot_id,
        finish_reason=record.finish_reason,
        prompt_tokens=record.prompt_tokens,
        tokens_reused_promised=record.tokens_reused_promised,
        tokens_reused_gift=record.tokens_reused_gift,
        tokens_read_recomputed=record.tokens_read_recomputed,
        tokens_computed=record.tokens_computed,
        grants=tuple(
            GrantFact(
                tokens=grant.num_tokens,
                write=grant.write,
                outcome=grant.outcome,
                reason=grant.reason,
                committed=grant.committed,
                lease_id=grant.lease_id,
            )
            for grant in record.grants
        ),
        output_tokens=record.output_tokens,
        overrun_tokens=record.overrun_tokens,
        tokens_recomputed_preemption=record.tokens_recomputed_preemption,
        num_preemptions=record.num_preemptions,
        reads_by_tier=record.reads_by_tier,
        queued_ms=record.queued_ms,
    )


def usage_of(quantities: Quantities) -> Usage:
    """The usage of a whole message, or of its start while `output` is 0."""
    return Usage(
        input_tokens=quantities.input,
        cache_creation_input_tokens=quantities.cache_write_5m + quantities.cache_write_1h,
        cache_read_input_tokens=quantities.cache_read,
        cache_creation=CacheCreation(
            ephemeral_5m_input_tokens=quantities.cache_write_5m,
            ephemeral_1h_input_tokens=quantities.cache_write_1h,
        ),
        output_tokens=quantities.output,
    )


def delta_usage_of(quantities: Quantities) -> DeltaUsage:
    """The cumulative usage at the end of a stream."""
    return DeltaUsage(
        input_tokens=quantities.input,
        cache_creation_input_tokens=quantities.cache_write_5m + quantities.cache_write_1h,
        cache_read_input_tokens=quantities.cache_read,
        output_tokens=quantities.output,
    )
