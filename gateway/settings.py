"""Settings: every environment variable of the gateway, with the reason for its default."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import AliasChoices, Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from billing.meters import TtlClass

ENV_PREFIX = "KVMETER_"
MAX_TTL_SECONDS = 366 * 86_400  # a year; what is longer is a slip, or ends past any clock
MAX_WAIT_SECONDS = 86_400


class Settings(BaseSettings):
    """The operator's choices. The README's table lists the same, in the same order."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, populate_by_name=True, extra="ignore"
    )

    host: str = Field(
        default="127.0.0.1",  # loopback: serving a network must be asked for
        validation_alias=AliasChoices("host", "HOST"),
    )
    port: int = Field(default=8080, ge=0, le=65_535, validation_alias=AliasChoices("port", "PORT"))
    data_dir: Path = Field(
        default=Path("var"),  # in the checkout: one folder to look into, one to delete
        validation_alias=AliasChoices("data_dir", "DATA_DIR"),
    )
    models_dir: Path = Path("var/models")  # outside DATA_DIR: models outlive a thrown-away ledger
    model: Path | None = None  # None: the default model, fetched and converted once
    database_url: str | None = None  # None: SQLite in DATA_DIR, nothing to install
    price_cards: Path | None = None  # None: the list prices that come with the package
    engine_url: str | None = None  # None: the Unix socket of the engine that `up` starts
    # The class's name; shorter to rehearse.
    cache_ttl_5m_seconds: int = Field(default=300, ge=1, le=MAX_TTL_SECONDS)
    cache_ttl_1h_seconds: int = Field(default=3600, ge=1, le=MAX_TTL_SECONDS)
    cache_min_tokens: int = Field(default=512, ge=1)  # what the API asks of its newest models
    cache_wait_seconds: float = Field(default=30.0, ge=0, le=30)  # for a write that another pays
    engine_wait_seconds: float = Field(default=10.0, ge=0, le=MAX_WAIT_SECONDS)  # for a restart
    gateway_dead_after_seconds: float = Field(default=20.0, gt=0, le=MAX_WAIT_SECONDS)
    max_connections: int = Field(default=4_096, ge=1)  # a stream each; fewer if descriptors lack
    max_connections_per_address: int = Field(default=1_024, ge=1)  # a proxy is one address
    # Of silence; proxies cut a stream at 30.
    ping_seconds: float = Field(default=10.0, gt=0, le=MAX_WAIT_SECONDS)
    log_format: Literal["text", "json"] = "text"  # read by a person first, by a collector later
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    redis_url: str | None = None

    @field_validator("redis_url")
    @classmethod
    def _refuse_redis(cls, value: str | None) -> str | None:
        if value is not None:
            raise ValueError(
                "KVMETER_REDIS_URL is not supported yet: unset it, "
                "one gateway keeps its state in the database."
            )
        return value

    @property
    def ledger_url(self) -> str:
        """Where the ledger is, as an SQLAlchemy URL."""
        return self.database_url or f"sqlite:///{self.data_dir / 'kvmeter.sqlite3'}"

    @property
    def link_url(self) -> str:
        """Where the engine listens."""
        return self.engine_url or f"unix:{self.data_dir / 'run' / 'engine.sock'}"

    @property
    def server_secret_path(self) -> Path:
        """Where older versions kept the server secret; the database has it now."""
        return self.data_dir / "server-secret"

    @property
    def first_keys_path(self) -> Path:
        """The file that holds the first organisation's keys."""
        return self.data_dir / "first-keys.json"

    def ttl_ms(self, ttl_class: TtlClass) -> int:
        """How long an entry of this class lives."""
        seconds = {"5m": self.cache_ttl_5m_seconds, "1h": self.cache_ttl_1h_seconds}
        return seconds[ttl_class] * 1000


def variable_of(loc: Sequence[int | str]) -> str:
    """The environment variable behind a fault of `Settings`, as the README's table names it."""
    name = ".".join(map(str, loc)).upper()
    return name if name in ("HOST", "PORT", "DATA_DIR") else f"{ENV_PREFIX}{name}"
