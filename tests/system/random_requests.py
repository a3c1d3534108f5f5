"""Random requests of a few tenants: streams, aborts, hits, expiries, refusals, faults."""

import random
from dataclasses import dataclass
from typing import Any

import httpx

from tests.gateway.talk import Split, split_of_usage
from tests.gateway.words import words
from tests.system.installation import Installation
from tests.system.streams import Stream

MODEL = "tiny"


@dataclass(frozen=True)
class Tenant:
    """A key, and the organisation that it belongs to."""

    organization_id: str
    api_key: str


@dataclass(frozen=True)
class Outcome:
    """What the client saw of one request; no split if it was refused or gone before it began."""

    tenant: Tenant
    request_id: str
    status: int
    split: Split | None
    output_tokens: int | None


@dataclass(frozen=True)
class Ask:
    """One request to make."""

    tenant: Tenant
    body: dict[str, Any]
    stream: bool
    close_after: int | None

    def send(self, installation: Installation) -> Outcome:
        """Make it; a stream may be left early."""
        if not self.stream:
            with installation.client(self.tenant.api_key) as client:
                response = client.post("/v1/messages", json=self.body)
            usage = response.json().get("usage")
            return self._outcome(response.headers, response.status_code, usage, usage)
        stream = Stream(installation, self.body, self.close_after, api_key=self.tenant.api_key)
        stream.run()
        assert stream.request_id is not None
        headers = httpx.Headers({"request-id": stream.request_id})
        return self._outcome(headers, stream.status or 0, stream.start_usage, stream.end_usage)

    def _outcome(
        self,
        headers: httpx.Headers,
        status: int,
        start: dict[str, Any] | None,
        end: dict[str, Any] | None,
    ) -> Outcome:
        return Outcome(
            self.tenant,
            headers["request-id"],
            status,
            None if start is None else split_of_usage(start),
            None if end is None else end["output_tokens"],
        )


def random_ask(chance: random.Random, tenants: list[Tenant]) -> Ask:
    """One request in six is faulty, streamed ones are left early now and then."""
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": chance.choice([0, 1, 4, 8, 16]),
        "system": _system(chance),
        "messages": _messages(chance),
    }
    stream = body["max_tokens"] > 0 and chance.random() < 0.5
    if chance.random() < 0.1:
        body |= {"max_tokens": 2_000}  # long enough to be left
        stream = True
    if chance.random() < 0.15:
        body |= chance.choice(
            [{"model": "unknown"}, {"surprise": 1}, {"messages": []}, {"max_tokens": -1}]
        )
    close_after = chance.randint(1, 5) if body["max_tokens"] == 2_000 else None
    return Ask(chance.choice(tenants), body, stream, close_after)


def _system(chance: random.Random) -> list[dict[str, Any]]:
    """One of a few long prefixes, marked or not, perhaps with a second marked part."""
    blocks = [_text(f"book{chance.randrange(6)}.", chance.choice([20, 60]), chance, marked=0.8)]
    if chance.random() < 0.4:
        blocks.append(_text(f"page{chance.randrange(3)}.", 20, chance, marked=0.7))
    if "1h" in [_ttl(block) for block in blocks[1:]] and _ttl(blocks[0]) == "5m":
        del blocks[0]["cache_control"]  # a long life never follows a short one
    return blocks


def _messages(chance: random.Random) -> list[dict[str, Any]]:
    turns = []
    for number in range(chance.choice([0, 0, 1, 2])):
        turns.append({"role": "user", "content": words(5, f"ask{number}.")})
        turns.append({"role": "assistant", "content": words(5, f"say{number}.")})
    question = {"type": "text", "text": words(chance.randint(1, 20), f"q{chance.randrange(9)}.")}
    return [*turns, {"role": "user", "content": [question]}]


def _text(tag: str, count: int, chance: random.Random, *, marked: float) -> dict[str, Any]:
    block: dict[str, Any] = {"type": "text", "text": words(count, tag)}
    if chance.random() < marked:
        block["cache_control"] = {"type": "ephemeral", "ttl": chance.choice(["5m", "5m", "1h"])}
    return block


def _ttl(block: dict[str, Any]) -> str | None:
    marker = block.get("cache_control")
    return None if marker is None else marker["ttl"]
