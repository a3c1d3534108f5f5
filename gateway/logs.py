"""Structured logs: an event name and fields, as text or JSON, never with prompts or keys.

Write `log.info("hold_settled", extra={"hold_id": hold.id})`. The request id is bound once, at the
edge, and stands on every line of that request. Of an exception only its class and place are
written, not its message: a message may quote what a client sent. A long text is cut: a client must
not fill the disk.
"""

import json
import logging
import sys
import traceback
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal, TextIO

from typing_extensions import override

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)

MAX_TEXT_CHARACTERS = 1_000  # of a field; our own longest, where an exception was, has about that

# What every record carries; what else it carries are the event's own fields.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}


def configure_logging(
    *, form: Literal["text", "json"], level: str, stream: TextIO | None = None
) -> None:
    """Send every logger's lines to `stream` (stderr); replaces what was configured before."""
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("alembic").setLevel(logging.WARNING)  # it logs every check of the schema
    logging.getLogger("uvicorn.access").disabled = True  # the edge writes a better line
    for chatty in ("alembic", "httpx"):  # a line for each probe of /readyz, each call out
        logging.getLogger(chatty).setLevel(logging.WARNING)


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(_fields(record), default=str)


class TextFormatter(logging.Formatter):
    """`time level event key=value …`."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        fields = _fields(record)
        head = f"{fields.pop('time')} {fields.pop('level')} {fields.pop('event')}"
        return " ".join([head, *(f"{name}={_quoted(value)}" for name, value in fields.items())])


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields: dict[str, object] = {
        "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
        "level": record.levelname.lower(),
        "event": " ".join(record.getMessage().split()),  # a library's may have several lines
    }
    if (bound := request_id.get()) is not None:
        fields["request_id"] = bound
    fields |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
    if record.exc_info and record.exc_info[0] is not None:
        fields["error"] = record.exc_info[0].__name__
        frames = traceback.extract_tb(record.exc_info[2])
        fields["at"] = " < ".join(f"{f.filename}:{f.lineno}" for f in reversed(frames))
    return {name: _cut(value) for name, value in fields.items()}


def _cut(value: object) -> object:
    if not isinstance(value, str) or len(value) <= MAX_TEXT_CHARACTERS:
        return value
    return f"{value[:MAX_TEXT_CHARACTERS]}... ({len(value)} characters)"


def _quoted(value: object) -> str:
    """The value, in quotes unless it is one printable word: a client must not forge a line."""
    text = str(value)
    plain = text.isprintable() and not any(c in text for c in ' "=')
    return text if text and plain else json.dumps(text)
