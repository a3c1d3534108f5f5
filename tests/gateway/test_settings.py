from pathlib import Path

import pytest
from pydantic import ValidationError

from gateway.settings import Settings


def test_the_defaults_serve_this_machine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOST", "PORT", "DATA_DIR"):
        monkeypatch.delenv(name, raising=False)

    settings = Settings()

    assert (settings.host, settings.port) == ("127.0.0.1", 8080)
    assert settings.ledger_url == "sqlite:///var/kvmeter.sqlite3"
    assert settings.link_url == "unix:var/run/engine.sock"
    assert settings.models_dir == Path("var/models")


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORT", "9000")
    monkeypatch.setenv("DATA_DIR", "/srv/kvmeter")
    monkeypatch.setenv("KVMETER_CACHE_TTL_5M_SECONDS", "2")
    monkeypatch.setenv("KVMETER_DATABASE_URL", "postgresql+psycopg://ledger")

    settings = Settings()

    assert settings.port == 9000
    assert settings.server_secret_path == Path("/srv/kvmeter/server-secret")
    assert (settings.ttl_ms("5m"), settings.ttl_ms("1h")) == (2_000, 3_600_000)
    assert settings.ledger_url == "postgresql+psycopg://ledger"


def test_an_argument_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_DIR", "/srv/kvmeter")

    assert Settings(data_dir=Path("here")).data_dir == Path("here")


def test_redis_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMETER_REDIS_URL", "redis://localhost")

    with pytest.raises(ValidationError, match="KVMETER_REDIS_URL is not supported yet"):
        Settings()


@pytest.mark.parametrize("value", ["0", "-1", "1e3", "99999999999999999999"])
@pytest.mark.parametrize("name", ["KVMETER_CACHE_TTL_5M_SECONDS", "KVMETER_CACHE_TTL_1H_SECONDS"])
def test_a_lifetime_that_no_clock_can_count_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)

    with pytest.raises(ValidationError):
        Settings()


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "1e300"])
@pytest.mark.parametrize("name", ["KVMETER_PING_SECONDS", "KVMETER_ENGINE_WAIT_SECONDS"])
def test_a_wait_that_no_timer_can_keep_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)

    with pytest.raises(ValidationError):
        Settings()
