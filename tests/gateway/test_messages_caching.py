"""The caching cases of the Messages API's conformance list, by their numbers."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.gateway.books import assert_books_agree
from tests.gateway.cache_oracle import Oracle
from tests.gateway.stack import PATIENCE_SECONDS, Stack, running_stack
from tests.gateway.talk import Split, assistant, hundreds, split_of, text, user

AUTOMATIC = {"type": "ephemeral"}


@pytest.fixture
def stack(tmp_path: Path):
    with running_stack(tmp_path) as stack:
        yield stack
        assert stack.open_holds() == []


def usage(stack: Stack, *, key: str | None = None, **body: Any) -> Split:
    """Ask, and check the books of what was answered."""
    response = stack.post(body, key=key)
    split = split_of(response)
    if key is None:
        assert_books_agree(stack, response.headers["request-id"], response.json()["usage"])
    return split


def refusal(stack: Stack, **body: Any) -> str:
    """The words of a 400 that left nothing behind."""
    response = stack.post(body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    message: str = response.json()["error"]["message"]
    return message


def test_m01_a_second_request_reads_what_the_first_wrote(stack: Stack):
    system = [text(2000, "s", ttl="5m")]

    first = usage(stack, system=system, messages=[user(text(20, "u"))])
    stack.at(10)
    second = usage(stack, system=system, messages=[user(text(30, "v"))])

    assert first == Split(w5=2000, input=20)
    assert second == Split(read=2000, input=30)
    assert (first.base_input_twentieths, second.base_input_twentieths) == (20 * 2520, 20 * 230)


@pytest.mark.parametrize(
    ("later", "expected"), [(290, Split(read=2000, input=1)), (301, Split(w5=2000, input=1))]
)
def test_m02_the_time_to_live_runs_from_the_start_of_the_request(
    stack: Stack, later: int, expected: Split
):
    system = [text(2000, "s", ttl="5m")]
    stack.runner.gate.clear()
    with stack.in_background({"system": system, "messages": [user(text(1))]}):
        stack.wait_until(lambda: stack.runner.num_steps == 2)  # at its first token
        stack.at(240)
        stack.runner.gate.set()
    stack.at(later)

    assert usage(stack, system=system, messages=[user(text(1))]) == expected


def test_m03_each_read_starts_the_time_to_live_again(stack: Stack):
    system = [text(2000, "s", ttl="5m")]
    splits = []
    for seconds in (0, 240, 480, 720):
        stack.at(seconds)
        splits.append(usage(stack, system=system, messages=[user(text(1))]))

    assert splits == [Split(w5=2000, input=1), *[Split(read=2000, input=1)] * 3]


def test_m04_a_breakpoint_below_the_minimum_is_inert(stack: Stack):
    short, enough = [text(511, "s", ttl="5m")], [text(512, "s", ttl="5m")]
    messages = [user(text(5, "u"))]

    assert usage(stack, system=short, messages=messages) == Split(input=516)
    assert usage(stack, system=short, messages=messages) == Split(input=516)
    assert usage(stack, system=enough, messages=messages) == Split(w5=512, input=5)
    assert usage(stack, system=enough, messages=messages) == Split(read=512, input=5)


@pytest.mark.parametrize(
    ("blocks", "expected"), [(34, Split(read=1500, w5=1900)), (35, Split(w5=3500))]
)
def test_m05_a_breakpoint_looks_back_over_twenty_blocks(stack: Stack, blocks: int, expected: Split):
    splits = []
    for seconds, count in enumerate((10, 15, blocks)):
        stack.at(seconds)
        splits.append(usage(stack, messages=[hundreds(count, marked=[count])]))

    assert splits == [Split(w5=1000), Split(read=1000, w5=500), expected]


def test_m06_an_earlier_breakpoint_opens_a_second_window(stack: Stack):
    for seconds, count in enumerate((10, 15)):
        stack.at(seconds)
        usage(stack, messages=[hundreds(count, marked=[count])])
    stack.at(2)

    assert usage(stack, messages=[hundreds(35, marked=[15, 35])]) == Split(read=1500, w5=2000)


def test_m08_a_long_marker_after_a_short_one_is_refused(stack: Stack):
    message = refusal(
        stack, system=[text(600, "s", ttl="5m")], messages=[user(text(600, ttl="1h"))]
    )

    assert "messages.0.content.0.cache_control.ttl" in message
    assert "a ttl='1h' cache_control block must not come after a ttl='5m'" in message


def test_m09_a_fifth_marker_is_refused(stack: Stack):
    four = [text(600, f"s{i}", ttl="5m") for i in range(4)]

    assert "Found 5." in refusal(stack, system=four, messages=[user(text(1, ttl="5m"))])
    assert "Found 5." in refusal(
        stack, system=four, messages=[user(text(1))], cache_control=AUTOMATIC
    )


def test_m10_automatic_caching_follows_a_growing_conversation(stack: Stack):
    system = [text(1500, "s")]
    turns = [
        user(text(50, "u1.")),
        assistant(text(120, "a1.")),
        user(text(60, "u2.")),
        assistant(text(200, "a2.")),
        user(text(10, "u3.")),
    ]

    splits = [
        usage(stack, system=system, messages=turns[:count], cache_control=AUTOMATIC)
        for count in (1, 3, 5)
    ]

    assert splits == [Split(w5=1550), Split(read=1550, w5=180), Split(read=1730, w5=210)]


def test_m11_an_automatic_marker_on_a_marked_block_is_the_same_marker(stack: Stack):
    body: dict[str, Any] = {"cache_control": AUTOMATIC}

    assert usage(stack, messages=[user(text(600, ttl="5m"))], **body) == Split(w5=600)
    assert "ttl" in refusal(stack, messages=[user(text(600, ttl="1h"))], **body)


def test_m13_without_a_marker_nothing_is_billed_as_cached(stack: Stack):
    messages = [user(text(3000))]

    first, second = (stack.post({"messages": messages}) for _ in range(2))

    assert split_of(first) == split_of(second) == Split(input=3000)
    gift = stack.record(second.headers["request-id"])["engine"]["tokens_reused_gift"]
    assert gift > 2900, "The engine reuses what it has, and says so."


def test_m14_of_two_requests_at_once_one_writes_and_the_other_waits_and_reads(stack: Stack):
    """The original has both pay the write; `docs/decisions/0002` has the reasons not to."""
    body = {"messages": [user(text(1000, "u", ttl="5m"))]}
    stack.runner.gate.clear()
    with stack.in_background(body) as first:
        assert stack.runner.at_gate.wait(PATIENCE_SECONDS)
        with stack.in_background(body) as second:
            stack.wait_until(lambda: stack.metric("kvmeter_cache_waiting") == 1)
            stack.runner.gate.set()

    assert split_of(first.result()) == Split(w5=1000)
    assert split_of(second.result()) == Split(read=1000)
    assert usage(stack, **body) == Split(read=1000)


def test_m15_no_workspace_reads_what_another_wrote(stack: Stack):
    body = {"system": [text(1000, "s", ttl="5m")], "messages": [user(text(1))]}
    other_workspace = stack.new_workspace(workspace="wrk_second")
    other_organization = stack.new_organization("org_other")

    for key in (None, other_workspace, other_organization):
        assert usage(stack, key=key, **body) == Split(w5=1000, input=1)
        assert usage(stack, key=key, **body) == Split(read=1000, input=1)


def test_m17_max_tokens_zero_writes_and_answers_nothing(stack: Stack):
    system = [text(800, "s", ttl="5m")]
    warmup = {"system": system, "messages": [user(text("warmup"))], "max_tokens": 0}

    response = stack.post(warmup)

    body = response.json()
    assert (body["content"], body["stop_reason"]) == ([], "max_tokens")
    assert body["usage"]["output_tokens"] == 0
    assert split_of(response) == Split(w5=800, input=1)
    assert_books_agree(stack, response.headers["request-id"], body["usage"])
    assert usage(stack, system=system, messages=[user(text(2))]) == Split(read=800, input=2)
    refusal(stack, **warmup, stream=True)


def test_m20_only_what_was_marked_is_written(stack: Stack):
    splits = [
        usage(stack, messages=[user(text(1500, "stable"), text(10, f"t{call}.", ttl="5m"))])
        for call in range(3)
    ]

    assert splits == [Split(w5=1510)] * 3


def test_m21_more_markers_cost_the_same(stack: Stack):
    one = [hundreds(12, marked=[12])]
    four = [hundreds(12, marked=[6, 8, 10, 12])]
    other = stack.new_organization("org_other")

    first, second = usage(stack, messages=one), usage(stack, key=other, messages=four)

    assert first == second == Split(w5=1200)
    assert first.base_input_twentieths == second.base_input_twentieths


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
