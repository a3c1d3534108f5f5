"""Converts the engine's records to billing's facts, and billed quantities to the API's usage."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from billing.cache_split import CacheSplit
from billing.facts import EngineFacts, GrantFact
from billing.lease_costs import LeaseCost
from billing.meters import Quantities
from billing.rows import DataclassInstance
from engine.client import EngineRecord, Grant, LeaseReport
from gateway.wire.events import DeltaUsage
from gateway.wire.response import CacheCreation, Usage

T = TypeVar("T", bound=DataclassInstance)


def cache_header(cache: CacheSplit) -> str:
    """Return the value of `x-kvmeter-cache`."""
    parts = [
        f"read={cache.quantities.cache_read}",
        f"write_5m={cache.quantities.cache_write_5m}",
        f"write_1h={cache.quantities.cache_write_1h}",
    ]
    if cache.refused:
        refusals = ",".join(f"{write.reason}@{write.num_tokens}" for write in cache.refused)
        parts.append(f"refused={refusals}")
    return "; ".join(parts)


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
    """Return the engine's record as billing's facts."""
    return from_engine(EngineFacts, record, grants=grant_facts(record.grants))


def grant_facts(grants: Sequence[Grant]) -> tuple[GrantFact, ...]:
    """Return the engine's grants as billing's facts."""
    return tuple(from_engine(GrantFact, grant) for grant in grants)


def lease_cost(report: LeaseReport) -> LeaseCost:
    """Return the engine's report of a lease as billing's cost."""
    return from_engine(LeaseCost, report)


def from_engine(cls: type[T], value: object, **known: Any) -> T:
    """Return a dataclass of billing with the values of the engine's fields of the same names."""
    same = {
        field.name: getattr(value, field.name) for field in fields(cls) if field.name not in known
    }
    return cls(**same, **known)


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
