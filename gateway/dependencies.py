"""Dependencies: settings, engine client, database, clock: what every request uses."""

from collections.abc import Callable
from dataclasses import dataclass, field

from billing.database import Database
from engine.client import EngineClient
from gateway.metrics import Metrics
from gateway.prompts.model_catalog import Catalog
from gateway.settings import Settings
from gateway.wake_ups import WakeUps


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """Everything that a request uses and does not bring itself.

    secret    the server secret, from which every namespace is derived
    boot_id   this process, as the owner of the holds that it opens
    now_ms    wall clock, milliseconds since the epoch
    new_id    returns a fresh id with a prefix: "req" gives "req_…"
    wake_ups  tell waiting requests that a cache entry of another one has changed
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
    wake_ups: WakeUps = field(default_factory=WakeUps)
