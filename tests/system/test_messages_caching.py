"""The caching cases M01 to M21 of docs/cases/messages-api.md, in words, through both SDKs.

WT: one word is one token, no template, a minimum of 512 tokens; t is the request's start.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.gateway.stack import PATIENCE_SECONDS, Stack, complete
from tests.gateway.talk import Split, assistant, hundreds, split_of, split_of_usage, text, user
from tests.sdk.versions import NEW, SdkError
from tests.system.conversation import AUTOMATIC, Conversation


def test_m01_the_second_request_reads_what_the_first_wrote(
    stack: Stack, talk: Conversation
) -> None:
    system = [text(2000, "s", ttl="5m")]

    first = talk.split(system=system, messages=[user(text(20, "u"))])
    stack.at(10)
    second = talk.split(system=system, messages=[user(text(30, "v"))])

    assert first == Split(w5=2000, input=20)
    assert second == Split(read=2000, input=30)
    assert first.base_input_twentieths == 20 * 2520
    assert second.base_input_twentieths == 20 * 230


@pytest.mark.parametrize(("later", "hit"), [(290, True), (301, False)])
def test_m02_an_entry_lives_from_the_start_of_its_request(
    stack: Stack, talk: Conversation, later: int, hit: bool
) -> None:
    body = {"system": [text(2000, "s", ttl="5m")], "messages": [user(text(20, "u"))]}

    stack.runner.gate.clear()
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(talk.split, **body)
        stack.wait_until(lambda: stack.runner.num_steps > 0)
        stack.at(240)
        stack.runner.gate.set()
        assert first.result() == Split(w5=2000, input=20)
    stack.at(later)

    assert talk.split(**body) == (Split(read=2000, input=20) if hit else Split(w5=2000, input=20))


def test_m03_each_read_starts_the_time_to_live_again(stack: Stack, talk: Conversation) -> None:
    body = {"system": [text(2000, "s", ttl="5m")], "messages": [user(text(20, "u"))]}

    split = []
    for seconds in (0, 240, 480, 720):
        stack.at(seconds)
        split.append(talk.split(**body))

    assert split == [Split(w5=2000, input=20), *[Split(read=2000, input=20)] * 3]


def test_m04_a_short_prefix_is_neither_written_nor_an_error(talk: Conversation) -> None:
    short = {"system": [text(511, "s", ttl="5m")], "messages": [user(text(5, "u"))]}
    long = {"system": [text(512, "s", ttl="5m")], "messages": [user(text(5, "u"))]}

    assert [talk.split(**short), talk.split(**short)] == [Split(input=516)] * 2
    assert talk.split(**long) == Split(w5=512, input=5)
    assert talk.split(**long) == Split(read=512, input=5)


@pytest.mark.parametrize(
    ("blocks", "expected"), [(34, Split(read=1500, w5=1900)), (35, Split(w5=3500))]
)
def test_m05_a_lookup_goes_back_twenty_positions(
    stack: Stack, talk: Conversation, blocks: int, expected: Split
) -> None:
    assert talk.split(messages=[hundreds(10, marked=[10])]) == Split(w5=1000)
    stack.at(1)
    assert talk.split(messages=[hundreds(15, marked=[15])]) == Split(read=1000, w5=500)
    stack.at(2)

    assert talk.split(messages=[hundreds(blocks, marked=[blocks])]) == expected


def test_m06_an_earlier_marker_opens_a_second_window(stack: Stack, talk: Conversation) -> None:
    talk.split(messages=[hundreds(10, marked=[10])])
    stack.at(1)
    talk.split(messages=[hundreds(15, marked=[15])])
    stack.at(2)

    last = talk.split(messages=[hundreds(35, marked=[15, 35])])

    assert last == Split(read=1500, w5=2000)


def test_m08_a_long_life_after_a_short_one_is_refused(talk: Conversation) -> None:
    system = [text(600, "s", ttl="5m")]
    path = "messages.0.content.0.cache_control.ttl"

    with pytest.raises(SdkError) as refused:
        talk.create(system=system, messages=[user(text(600, "u", ttl="1h"))])

    assert refused.value.status == 400
    assert path in refused.value.message
    assert "a ttl='1h' cache_control block must not come after a ttl='5m'" in refused.value.message

    with pytest.raises(SdkError, match=r"system\.1\.cache_control\.ttl"):
        talk.create(system=[*system, text(600, "t", ttl="1h")], messages=[user(text("hello"))])


def test_m09_five_markers_are_one_too_many(talk: Conversation) -> None:
    five = [text(10, f"t{i}.", ttl="5m") for i in range(5)]

    with pytest.raises(SdkError, match=r"Found 5\.") as refused:
        talk.create(messages=[user(*five)])
    assert refused.value.status == 400

    with pytest.raises(SdkError, match=r"Found 5\."):
        talk.create(cache_control=AUTOMATIC, messages=[user(*five[:4], text(10, "last"))])


def test_m10_automatic_caching_follows_the_conversation(stack: Stack, talk: Conversation) -> None:
    system = [text(1500, "s")]
    turns = [
        [user(text(50, "u"))],
        [assistant(text(120, "a")), user(text(60, "v"))],
        [assistant(text(200, "b")), user(text(10, "w"))],
    ]

    split, messages = [], []
    for seconds, turn in enumerate(turns):
        stack.at(seconds)
        messages += turn
        split.append(talk.split(cache_control=AUTOMATIC, system=system, messages=messages))

    assert split == [
        Split(w5=1550),
        Split(read=1550, w5=180),
        Split(read=1730, w5=210),
    ]


def test_m11_the_automatic_marker_joins_an_equal_one(talk: Conversation) -> None:
    blocks = [text(300, f"t{i}.", ttl="5m") for i in range(4)]

    assert talk.split(cache_control=AUTOMATIC, messages=[user(*blocks)]) == Split(w5=1200)

    with pytest.raises(SdkError) as refused:
        talk.create(cache_control=AUTOMATIC, messages=[user(text(600, "u", ttl="1h"))])
    assert refused.value.status == 400


def test_m13_without_a_marker_nothing_is_claimed(talk: Conversation) -> None:
    body = {"messages": [user(text(3000, "u"))]}

    assert [talk.split(**body), talk.split(**body)] == [Split(input=3000)] * 2


def test_m14_of_two_requests_at_once_one_writes_and_the_other_waits_and_reads(
    stack: Stack, talk: Conversation
) -> None:
    """The original has both pay the write; `docs/decisions/0002` has the reasons not to."""
    body = {"messages": [user(text(1000, "u", ttl="5m"))]}

    stack.runner.gate.clear()
    with stack.in_background(body) as first:
        assert stack.runner.at_gate.wait(PATIENCE_SECONDS)
        with ThreadPoolExecutor(1) as threads:
            second = threads.submit(talk.split, **body)
            stack.wait_until(lambda: stack.metric("kvmeter_cache_waiting") == 1)
            stack.runner.gate.set()

    assert split_of(first.result()) == Split(w5=1000)
    assert second.result() == Split(read=1000)
    assert talk.split(**body) == Split(read=1000)


def test_m15_no_workspace_reads_what_another_wrote(stack: Stack, talk: Conversation) -> None:
    body = {"system": [text(2000, "s", ttl="5m")], "messages": [user(text(20, "u"))]}
    same_organization = talk.with_key(stack.new_workspace(workspace="wrk_same"))
    other_organization = talk.with_key(stack.new_organization("org_two"))

    split = [t.split(**body) for t in (talk, same_organization, other_organization)]

    assert split == [Split(w5=2000, input=20)] * 3
    assert same_organization.split(**body) == Split(read=2000, input=20)


def test_m16_an_answer_sent_back_is_the_same_prefix(talk: Conversation) -> None:
    body = {"cache_control": AUTOMATIC, "messages": [user(text(600, "u"))]}
    then = user(text(20, "v"))

    answer = talk.create(**body)["message"]
    as_string = {"role": "assistant", "content": answer["content"][0]["text"]}
    sent_back = talk.split(**{**body, "messages": [*body["messages"], as_string, then]})
    assert sent_back == Split(read=600, w5=25)

    if talk.sdk.version == NEW:  # older messages have no to_param()
        other = {"cache_control": AUTOMATIC, "messages": [user(text(600, "o"))]}
        second = talk.call("round_trip", **complete(other), then=then)["message"]
        assert split_of_usage(second["usage"]) == Split(read=600, w5=25)


def test_m17_zero_output_tokens_warm_the_cache(talk: Conversation) -> None:
    system = [text(800, "s", ttl="5m")]
    body = {"system": system, "messages": [user(text("warmup"))], "max_tokens": 0}

    message = talk.create(**body)["message"]

    assert message["content"] == []
    assert message["stop_reason"] == "max_tokens"
    assert message["usage"]["output_tokens"] == 0
    assert message["usage"]["cache_creation_input_tokens"] == 800
    assert message["usage"]["input_tokens"] == 1
    assert talk.split(system=system, messages=[user(text(9, "u"))]) == Split(read=800, input=9)
    for variant in (
        {"stream": True},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        {"tool_choice": {"type": "any"}},
    ):
        with pytest.raises(SdkError) as refused:
            talk.create(**body, extra_body=variant)
        assert refused.value.status == 400, variant


def test_m19_a_marker_in_a_wrong_place_is_refused(talk: Conversation) -> None:
    marker = {"cache_control": {"type": "ephemeral"}}
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s", **marker}
    faults = {
        "thinking.cache_control: Extra inputs are not permitted": [
            user(text("a")), {"role": "assistant", "content": [thinking]}, user(text("b"))
        ],
        "cache_control cannot be set for empty text blocks": [
            user({"type": "text", "text": "", **marker}, text("a"))
        ],
        "messages.0.cache_control: Extra inputs are not permitted": [user(text("a")) | marker],
        "messages.0.content.0.text.cache_control.ttl": [user(text(5, ttl="2h"))],
    }  # fmt: skip

    for wording, messages in faults.items():
        with pytest.raises(SdkError) as refused:
            talk.create(messages=messages)
        assert refused.value.status == 400
        assert wording in refused.value.message


def test_m20_a_changing_marked_block_is_written_every_time(
    stack: Stack, talk: Conversation
) -> None:
    split = []
    for seconds in range(3):
        stack.at(seconds)
        stamped = text(10, f"time{seconds}.", ttl="5m")
        split.append(talk.split(messages=[user(text(1500, "stable"), stamped)]))

    assert split == [Split(w5=1510)] * 3


def test_m21_more_markers_cost_the_same(stack: Stack, talk: Conversation) -> None:
    one = [hundreds(24, marked=[24])]
    four = [hundreds(24, marked=[6, 12, 18, 24])]
    other = talk.with_key(stack.new_organization("org_two"))

    assert talk.split(messages=one) == other.split(messages=four) == Split(w5=2400)
