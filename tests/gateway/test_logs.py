import io
import json
import logging
from collections.abc import Iterator

import pytest

from gateway import logs

log = logging.getLogger("tests.gateway")


@pytest.fixture(autouse=True)
def root_logger_restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("uvicorn.access").disabled = False


def test_a_line_of_json_carries_the_events_fields() -> None:
    stream = io.StringIO()
    logs.configure_logging(form="json", level="info", stream=stream)

    bound = logs.request_id.set("req_1")
    log.info("hold_settled", extra={"hold_id": "h", "cost_nanos": 5})
    log.debug("not_this")
    logs.request_id.reset(bound)

    (line,) = stream.getvalue().splitlines()
    fields = json.loads(line)
    assert fields.pop("time").endswith("+00:00")
    assert fields == {
        "level": "info",
        "event": "hold_settled",
        "request_id": "req_1",
        "hold_id": "h",
        "cost_nanos": 5,
    }


def test_a_line_of_text_quotes_what_needs_it() -> None:
    stream = io.StringIO()
    logs.configure_logging(form="text", level="info", stream=stream)

    log.warning("link_lost", extra={"url": "unix:/a b", "seconds": 2, "path": "/x\r\nforged"})

    assert stream.getvalue().endswith(
        r' warning link_lost url="unix:/a b" seconds=2 path="/x\r\nforged"' + "\n"
    )


def test_a_librarys_message_of_several_lines_is_one_line() -> None:
    stream = io.StringIO()
    logs.configure_logging(form="text", level="info", stream=stream)

    log.warning("Exception in %s\n2026-01-01 forged\n", "ASGI application")

    assert stream.getvalue().endswith("Exception in ASGI application 2026-01-01 forged\n")
    assert stream.getvalue().count("\n") == 1


@pytest.mark.parametrize("form", ["json", "text"])
def test_of_an_exception_only_class_and_place_are_written(form) -> None:
    stream = io.StringIO()
    logs.configure_logging(form=form, level="info", stream=stream)

    try:
        raise ValueError("what a client sent")
    except ValueError:
        log.exception("request_failed")

    assert "ValueError" in stream.getvalue()
    assert "test_logs.py" in stream.getvalue()
    assert "what a client sent" not in stream.getvalue()
    assert stream.getvalue().count("\n") == 1


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_long_field_is_cut(form) -> None:
    stream = io.StringIO()
    logs.configure_logging(form=form, level="info", stream=stream)

    log.info("request", extra={"path": "/" + "a" * 57_000, "status": 404})

    line = stream.getvalue()
    assert len(line) < 2 * logs.MAX_TEXT_CHARACTERS
    assert "(57001 characters)" in line
    assert "404" in line
