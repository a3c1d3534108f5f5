"""What the gateway is made of: built once by an entry point, or by a test."""

from collections.abc import Callable
from dataclasses import dataclass, field

from billing.database import Database
from engine.client import EngineClient
from gateway.metrics import Metrics
from gateway.prompts.model_catalog import Catalog
from gateway.requests.entry_wait import WaitingRoom
from gateway.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """Everything a request uses that is not in the request.

    secret    the server secret behind every namespace
    boot_id   this process, as the owner of the holds it opens
    now_ms    wall clock, milliseconds since the epoch
    new_id    prefix to a fresh id: "req" to "req_…"

    The waiting room is where a request's end, whoever brings it about, is told to those who wait
    for what it writes.
    """

    settings: Settings
    engine: EngineClient
    database: Database
    catalog: Catalog
    secret: bytes
    boot_id: str
    now_ms: Callable[[], int]
    new_id: Callable[[str], str]
    metrics: Metrics = field(default_factory=Metrics)
    waiting_room: WaitingRoom = field(default_factory=WaitingRoom)
