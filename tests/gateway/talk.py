"""Request bodies in words, and what comes back as plain values."""

import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import httpx

from tests.gateway.words import words


class Split(NamedTuple):
    """How a prompt was billed: read, 5-minute write, 1-hour write, plain input."""

    read: int = 0
    w5: int = 0
    w1h: int = 0
    input: int = 0

    @property
    def prompt(self) -> int:
        return sum(self)

    @property
    def base_input_twentieths(self) -> int:
        """The input side in base-input tokens, times 20 to stay whole."""
        return 2 * self.read + 25 * self.w5 + 40 * self.w1h + 20 * self.input


def text(content: str | int, tag: str = "w", *, ttl: str | None = None) -> dict[str, Any]:
    """A text block, of so many words or of this text; marked if `ttl` is given."""
    block: dict[str, Any] = {
        "type": "text",
        "text": words(content, tag) if isinstance(content, int) else content,
    }
    if ttl is not None:
        block["cache_control"] = {"type": "ephemeral", "ttl": ttl}
    return block


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def hundreds(count: int, *, marked: Iterable[int]) -> dict[str, Any]:
    """One user message of 100-word blocks, numbered from 1, some of them marked for 5 minutes."""
    marks = set(marked)
    return user(
        *(text(100, f"b{i}.", ttl="5m" if i in marks else None) for i in range(1, count + 1))
    )


def split_of(response: httpx.Response) -> Split:
    """The split of a whole message."""
    assert response.status_code == 200, response.text
    return split_of_usage(response.json()["usage"])


def split_of_usage(usage: dict[str, Any]) -> Split:
    """The split in a `usage` object, whose two ways to tell the creation must agree."""
    creation = usage["cache_creation"]
    split = Split(
        usage["cache_read_input_tokens"],
        creation["ephemeral_5m_input_tokens"],
        creation["ephemeral_1h_input_tokens"],
        usage["input_tokens"],
    )
    assert usage["cache_creation_input_tokens"] == split.w5 + split.w1h
    return split


def read_events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a stream as they come; each record's name is its data's type."""
    name = None
    for line in response.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            data: dict[str, Any] = json.loads(line.removeprefix("data: "))
            assert data["type"] == name
            yield data
