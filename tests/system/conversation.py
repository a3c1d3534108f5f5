"""One SDK version talking to the word stack: bodies in words, usage as a tuple."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from tests.gateway.stack import MODEL, complete
from tests.gateway.words import words

from tests.sdk.versions import Sdk


class Usage(NamedTuple):
    """How a prompt was split: read, 5-minute write, 1-hour write, plain input."""

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
        return 20 * self.input + 25 * self.w5 + 40 * self.w1h + 2 * self.read


def text(count: int, tag: str = "w", *, ttl: str | None = None) -> dict[str, Any]:
    """A text block of `count` words, marked if `ttl` is given."""
    block: dict[str, Any] = {"type": "text", "text": words(count, tag)}
    if ttl is not None:
        block["cache_control"] = {"type": "ephemeral", "ttl": ttl}
    return block


def user(*blocks: dict[str, Any] | str) -> dict[str, Any]:
    return {"role": "user", "content": list(map(_block, blocks))}


def assistant(*blocks: dict[str, Any] | str) -> dict[str, Any]:
    return {"role": "assistant", "content": list(map(_block, blocks))}


def _block(block: dict[str, Any] | str) -> dict[str, Any]:
    return {"type": "text", "text": block} if isinstance(block, str) else block


def hundreds(count: int, *, marked: Iterable[int]) -> dict[str, Any]:
    """A user message of 100-word blocks; `marked` are the block numbers, from 1, with a marker."""
    marks = set(marked)
    return user(
        *(text(100, f"b{i}.", ttl="5m" if i in marks else None) for i in range(1, count + 1))
    )


AUTOMATIC = {"type": "ephemeral"}


def read_usage(usage: dict[str, Any]) -> Usage:
    """The split in a response's `usage`, whose two creation counts must agree."""
    creation = usage["cache_creation"]
    split = Usage(
        usage["cache_read_input_tokens"],
        creation["ephemeral_5m_input_tokens"],
        creation["ephemeral_1h_input_tokens"],
        usage["input_tokens"],
    )
    assert usage["cache_creation_input_tokens"] == split.w5 + split.w1h
    return split


class Conversation:
    """Calls with one SDK version and one key."""

    def __init__(self, sdk: Sdk, *, base_url: str, api_key: str) -> None:
        self.sdk = sdk
        self.base_url = base_url
        self.api_key = api_key

    def with_key(self, api_key: str) -> "Conversation":
        """The same SDK with another key."""
        return Conversation(self.sdk, base_url=self.base_url, api_key=api_key)

    def call(self, call: str, **arguments: Any) -> dict[str, Any]:
        return self.sdk.call(call, base_url=self.base_url, api_key=self.api_key, **arguments)

    def create(self, **body: Any) -> dict[str, Any]:
        """One answer, at most five words long unless `body` says otherwise."""
        return self.call("create", **complete(body))

    def usage(self, **body: Any) -> Usage:
        """The split of one request."""
        return read_usage(self.create(**body)["message"]["usage"])

    def count(self, **body: Any) -> int:
        counted = {key: body[key] for key in body.keys() - {"max_tokens", "stop_sequences"}}
        tokens: int = self.call("count_tokens", model=MODEL, **counted)["input_tokens"]
        return tokens
