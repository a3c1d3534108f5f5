"""Streams that a test holds open from threads, and what each of them saw."""

import json
import threading
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

from tests.system.installation import Installation


@dataclass
class Stream:
    """One streamed request: its id once the headers are there, and how it went on."""

    installation: Installation
    body: dict[str, Any]
    close_after: int | None = None
    api_key: str | None = None
    request_id: str | None = None
    status: int | None = None
    start_usage: dict[str, Any] | None = None
    end_usage: dict[str, Any] | None = None
    num_texts: int = 0
    text: str = ""
    begun: threading.Event = field(default_factory=threading.Event)
    ended: bool = False

    def run(self) -> Self:
        """Read the stream to its end, or until the server is gone."""
        try:
            with (
                self.installation.client(self.api_key) as client,
                client.stream("POST", "/v1/messages", json={**self.body, "stream": True}) as answer,
            ):
                self.request_id = answer.headers.get("request-id")
                self.status = answer.status_code
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        self._take(json.loads(line.removeprefix("data: ")))
                    if self.num_texts == self.close_after:
                        break
        except httpx.TransportError:
            pass  # the server was killed: what was seen until then stands
        finally:
            self.begun.set()
        return self

    def _take(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "message_start":
                self.start_usage = event["message"]["usage"]
            case "content_block_delta":
                self.num_texts += 1
                self.text += event["delta"]["text"]
                self.begun.set()
            case "message_delta":
                self.end_usage = event["usage"]
            case "message_stop":
                self.ended = True
