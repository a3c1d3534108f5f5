"""Request bodies and what is read from them."""

import json
from typing import Any

from gateway.http.validation import read_body
from gateway.wire.request import ApiVersion, MessagesRequest

EPHEMERAL = {"type": "ephemeral"}
EPHEMERAL_1H = {"type": "ephemeral", "ttl": "1h"}


def body(**fields: Any) -> dict[str, Any]:
    sound = {"model": "wt", "max_tokens": 8, "messages": [{"role": "user", "content": "Hi there"}]}
    return sound | fields


def text(words: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **fields}


def turn(role: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def read(version: ApiVersion = "2023-06-01", **fields: Any) -> MessagesRequest:
    return read_body(MessagesRequest, json.dumps(body(**fields)).encode(), version=version)
