"""The engine's public API: an asyncio client and the protocol's types; without torch or core."""

from engine.client.interface import EngineClient, RequestStream
from engine.client.link_client import connect_engine
from engine.errors import AddressError, EngineLost
from engine.protocol import (
    Admitted,
    Breakpoint,
    Committed,
    EngineInfo,
    EngineRecord,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    Grant,
    GrantOutcome,
    LeaseReport,
    RejectCode,
    Rejected,
    ReportReason,
    Sampling,
    Tokens,
)

__all__ = [
    "AddressError",
    "Admitted",
    "Breakpoint",
    "Committed",
    "EngineClient",
    "EngineInfo",
    "EngineLost",
    "EngineRecord",
    "Event",
    "FinishReason",
    "Finished",
    "GenerateRequest",
    "Grant",
    "GrantOutcome",
    "LeaseReport",
    "RejectCode",
    "Rejected",
    "ReportReason",
    "RequestStream",
    "Sampling",
    "Tokens",
    "connect_engine",
]
