"""What caching bills, beyond the cases that tests/system runs through both SDKs."""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.gateway.books import assert_books_agree
from tests.gateway.cache_oracle import Oracle
from tests.gateway.stack import Stack, complete, running_stack
from tests.gateway.talk import Split, split_of, text, user


@pytest.fixture
def stack(tmp_path: Path):
    with running_stack(tmp_path) as stack:
        yield stack
        assert stack.open_holds() == []


def usage(stack: Stack, **body: Any) -> Split:
    """Ask, and check the books of what was answered."""
    response = stack.post(body)
    assert_books_agree(stack, response.headers["request-id"], response.json()["usage"])
    return split_of(response)


def test_what_the_engine_reuses_without_a_marker_is_a_gift_in_the_record(stack: Stack):
    messages = [user(text(3000))]

    _first, second = (stack.post({"messages": messages}) for _ in range(2))

    assert split_of(second) == Split(input=3000)
    gift = stack.record(second.headers["request-id"])["engine"]["tokens_reused_gift"]
    assert gift > 2900, "The engine reuses what it has, and says so."


def test_random_layouts_of_markers_are_billed_as_the_rules_say(stack: Stack):
    random, oracle, seconds = Random(1), Oracle(min_tokens=512), 0
    total_read = 0
    for _ in range(40):
        seconds += random.choice([0, 1, 100, 299, 300, 301])
        stack.at(seconds)
        changed_from = random.randint(0, 40)
        contents = [
            (f"{i}{random.choice('ab') if i >= changed_from else ''}.", 30 + 60 * (i % 2))
            for i in range(random.randint(1, 30))
        ]
        marked = sorted(random.sample(range(len(contents)), random.randint(0, 4) % len(contents)))
        num_long = random.randint(0, len(marked))
        marks = {i: "1h" if at < num_long else "5m" for at, i in enumerate(marked)}
        blocks = [text(tokens, tag, ttl=marks.get(i)) for i, (tag, tokens) in enumerate(contents)]

        split = usage(stack, messages=[user(*blocks)])

        lengths = [tokens for _, tokens in contents]
        named = [(block["text"], n) for block, n in zip(blocks, lengths, strict=True)]
        q = oracle.bill(named, marks, seconds * 1000)
        assert split == Split(q.cache_read, q.cache_write_5m, q.cache_write_1h, q.input)
        total_read += split.read
    assert total_read > 0, "The run must have met hits."


def test_a_1h_entry_stays_one_when_a_5m_marker_reads_it(stack: Stack):
    messages = [user(text(1))]
    usage(stack, system=[text(1000, "s", ttl="1h")], messages=messages)
    stack.at(3000)
    hit = usage(stack, system=[text(1000, "s", ttl="5m")], messages=messages)
    stack.at(6000)

    again = usage(stack, system=[text(1000, "s", ttl="5m")], messages=messages)

    assert hit == again == Split(read=1000, input=1)


def test_a_read_refreshes_every_live_entry_on_its_path(stack: Stack):
    system = [text(600, "s1.", ttl="5m"), text(600, "s2.", ttl="5m")]
    usage(stack, system=system, messages=[user(text(1))])
    stack.at(200)
    usage(stack, system=system, messages=[user(text(1))])
    stack.at(400)

    shorter = usage(stack, system=system[:1], messages=[user(text(1))])

    assert shorter == Split(read=600, input=1)


def test_a_slow_body_starts_its_request_when_it_has_arrived(stack: Stack):
    ask = complete({"system": [text(2000, "s", ttl="5m")], "messages": [user(text(20, "u"))]})
    assert split_of(stack.post(ask)) == Split(w5=2000, input=20)
    body = json.dumps(ask).encode()

    def slowly() -> Iterator[bytes]:
        yield body[:10]
        stack.at(301)
        yield body[10:]

    headers = {"content-type": "application/json"}
    response = stack.http().post("/v1/messages", content=slowly(), headers=headers)

    assert split_of(response) == Split(w5=2000, input=20)
