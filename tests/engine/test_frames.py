from dataclasses import is_dataclass
from types import UnionType
from typing import get_args, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import FrameError
from engine.link.frames import (
    MAX_FRAME_BYTES,
    Abort,
    ClientMessage,
    EngineMessage,
    Fault,
    Finish,
    Found,
    FrameReader,
    Gauges,
    Hello,
    Lookup,
    Recent,
    RecentIds,
    Reports,
    Stats,
    StepFrame,
    Submit,
    Unpin,
    Unpinned,
    encode_client,
    encode_engine,
)
from engine.protocol import (
    Admitted,
    Breakpoint,
    Committed,
    EngineInfo,
    EngineRecord,
    Finished,
    GenerateRequest,
    Grant,
    LeaseReport,
    Rejected,
    Sampling,
    Tokens,
)

SCALARS = {
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
}


def values(kind):
    """Any value of a protocol type that fits the wire."""
    if is_dataclass(kind):
        fields = get_type_hints(kind)
        return st.builds(kind, **{name: values(hint) for name, hint in fields.items()})
    arguments = get_args(kind)
    if get_origin(kind) is UnionType:
        return st.one_of([values(argument) for argument in arguments])
    if get_origin(kind) is tuple:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if get_origin(kind) is dict:
        return st.dictionaries(st.text(max_size=5), values(arguments[1]), max_size=2)
    return SCALARS.get(kind, st.from_type(kind))


def read(union, data, chunk=1 << 20):
    reader = FrameReader(union)
    return [
        message
        for start in range(0, len(data), chunk)
        for message in reader.feed(data[start : start + chunk])
    ]


def frame(data):
    body = msgpack.packb(data)
    return len(body).to_bytes(4, "big") + body


@given(st.lists(values(ClientMessage), max_size=4), st.integers(1, 50))
def test_client_messages_survive_the_wire_however_it_is_cut(messages, chunk):
    data = b"".join(map(encode_client, messages))

    assert read(ClientMessage, data, chunk) == messages


@given(st.lists(values(EngineMessage), max_size=4), st.integers(1, 50))
def test_engine_messages_survive_the_wire_however_it_is_cut(messages, chunk):
    data = b"".join(map(encode_engine, messages))

    assert read(EngineMessage, data, chunk) == messages


@given(st.binary(max_size=200))
def test_random_bytes_are_waited_for_or_refused(data):
    try:
        messages = read(ClientMessage, data)
    except FrameError:
        return
    assert messages == []


@given(st.binary(max_size=100))
def test_a_whole_frame_of_random_bytes_is_refused(body):
    with pytest.raises(FrameError):
        read(ClientMessage, len(body).to_bytes(4, "big") + body)


def test_a_truncated_frame_is_waited_for():
    data = encode_client(Abort("req_1"))

    assert read(ClientMessage, data[:-1]) == []


def test_a_huge_length_is_refused_before_its_bytes_come():
    with pytest.raises(FrameError, match="Frame too long"):
        read(ClientMessage, (MAX_FRAME_BYTES + 1).to_bytes(4, "big"))


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ([], "Expected one of"),
        ({}, "Expected one of"),
        ({"t": ["abort"]}, "Expected one of"),
        ({"t": "step", "events": []}, "Expected one of"),
        ({"t": "abort"}, "Missing field of Abort"),
        ({"t": "abort", "request_id": 7}, "request_id: Expected str: 7"),
        ({"t": "abort", "request_id": b"r"}, "request_id: Expected str: bytes"),
        ({"t": "abort", "request_id": "r", "why": ""}, "Unknown field of Abort: 'why'"),
        ({"t": "finish", "request_id": "r", "output_tokens": True}, "Expected int: True"),
        ({"t": "finish", "request_id": "r", "output_tokens": 1.0}, "Expected int: 1.0"),
        ({"t": "lookup", "call": 1, "request_ids": "abc"}, "Expected a list: 'abc'"),
        ({"t": "submit", "request": {"sampling": {"temperature": float("nan")}}}, "finite"),
        ({"t": "submit", "request": {"sampling": {"seed": "x"}}}, "sampling: seed: Expected int"),
        ({"t": "submit", "request": {"breakpoints": [{"tokens": 1, "ttl_ms": 2}]}}, "Missing"),
        ({"t": "submit", "request": None}, "Expected a map for GenerateRequest: None"),
    ],
)
def test_what_is_not_a_message_is_refused_with_its_place(data, sentence):
    with pytest.raises(FrameError, match=sentence):
        read(ClientMessage, frame(data))


def test_a_request_of_an_older_client_means_what_it_meant():
    old = {"request_id": "r", "namespace": b"n", "prompt": b"\0" * 4, "max_tokens": 1}

    (message,) = read(ClientMessage, frame({"t": "submit", "request": old}))

    assert not message.request.ignore_eos


def test_what_cannot_be_framed_is_refused_by_the_sender():
    with pytest.raises(FrameError, match="Cannot be framed"):
        encode_client(Finish("req_1", 2**70))
    with pytest.raises(FrameError, match="Cannot be framed"):
        encode_client(Abort("\ud800"))


REQUEST = GenerateRequest(
    request_id="req_1",
    namespace=b"n",
    prompt_token_ids=b"\1\0\0\0\2\0\0\0",
    max_tokens=5,
    read_tokens=1,
    sampling=Sampling(temperature=0.5, top_p=0.9, top_k=3, seed=7),
    stop_token_ids=(9,),
    breakpoints=(Breakpoint(num_tokens=2, ttl_ms=300_000, write=True, persist=True),),
    ignore_eos=True,
)
GRANT = Grant(
    num_tokens=2, write=True, outcome="refused", reason="quota", committed=True, lease_id="lse_1"
)
RECORD = EngineRecord(
    request_id="req_1",
    engine_boot_id="eng_1",
    prompt_tokens=2,
    read_tokens=1,
    tokens_reused_promised=1,
    tokens_reused_gift=0,
    tokens_read_recomputed=0,
    tokens_computed=1,
    grants=(GRANT,),
    output_tokens=3,
    overrun_tokens=4,
    finish_reason="max_tokens",
    tokens_recomputed_preemption=5,
    num_preemptions=6,
    reads_by_tier={"disk": 1},
    queued_ms=8,
)
REPORT = LeaseReport(
    lease_id="lse_1",
    request_id="req_1",
    num_tokens=2,
    reason="expired",
    tier="device",
    num_bytes=64,
    idle_block_ms=10,
    contended_block_ms=11,
)
INFO = EngineInfo(
    engine_id="engine_1",
    engine_boot_id="eng_1",
    model_id="m",
    weights_digest="d",
    vocab_size=10,
    max_model_len=20,
    max_request_tokens=30,
    block_size=16,
    num_blocks=40,
    pin_cap_blocks=50,
    dtype="float32",
    device="cpu",
    stop_token_ids=(9,),
    default_sampling=Sampling(),
)
GRANT_KEYS = {
    "tokens": 2,
    "write": True,
    "outcome": "refused",
    "reason": "quota",
    "committed": True,
    "lease_id": "lse_1",
}
RECORD_KEYS = {
    "request_id": "req_1",
    "engine_boot_id": "eng_1",
    "prompt_tokens": 2,
    "read_tokens": 1,
    "tokens_reused_promised": 1,
    "tokens_reused_gift": 0,
    "tokens_read_recomputed": 0,
    "tokens_computed": 1,
    "grants": [GRANT_KEYS],
    "output_tokens": 3,
    "overrun_tokens": 4,
    "finish_reason": "max_tokens",
    "tokens_recomputed_preemption": 5,
    "num_preemptions": 6,
    "reads_by_tier": {"disk": 1},
    "queued_ms": 8,
}
REPORT_KEYS = {
    "lease_id": "lse_1",
    "request_id": "req_1",
    "tokens": 2,
    "reason": "expired",
    "tier": "device",
    "num_bytes": 64,
    "idle_block_ms": 10,
    "contended_block_ms": 11,
}
CLIENT_FRAMES = [
    (Hello(), {"t": "hello", "version": 1, "info": None}),
    (
        Submit(REQUEST),
        {
            "t": "submit",
            "request": {
                "request_id": "req_1",
                "namespace": b"n",
                "prompt": b"\1\0\0\0\2\0\0\0",
                "max_tokens": 5,
                "read_tokens": 1,
                "sampling": {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 7},
                "stop_token_ids": [9],
                "breakpoints": [{"tokens": 2, "ttl_ms": 300_000, "write": True, "persist": True}],
                "ignore_eos": True,
            },
        },
    ),
    (Abort("req_1"), {"t": "abort", "request_id": "req_1"}),
    (Finish("req_1", 3), {"t": "finish", "request_id": "req_1", "output_tokens": 3}),
    (Lookup(1, ("req_1",)), {"t": "lookup", "call": 1, "request_ids": ["req_1"]}),
    (Recent(3, 5), {"t": "recent", "call": 3, "limit": 5}),
    (Stats(2), {"t": "stats", "call": 2}),
    (
        Unpin(3, ("lse_1",), (b"n",)),
        {"t": "unpin", "call": 3, "lease_ids": ["lse_1"], "namespaces": [b"n"]},
    ),
]
ENGINE_FRAMES = [
    (
        Hello(info=INFO),
        {
            "t": "hello",
            "version": 1,
            "info": {
                "engine_id": "engine_1",
                "engine_boot_id": "eng_1",
                "model_id": "m",
                "weights_digest": "d",
                "vocab_size": 10,
                "max_model_len": 20,
                "max_request_tokens": 30,
                "block_size": 16,
                "num_blocks": 40,
                "pin_cap_blocks": 50,
                "dtype": "float32",
                "device": "cpu",
                "stop_token_ids": [9],
                "default_sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": None},
            },
        },
    ),
    (
        StepFrame(
            (
                Admitted("req_1", (GRANT,), 1),
                Committed("req_1", 2),
                Tokens("req_1", (4, 5)),
                Finished("req_1", "max_tokens", RECORD),
                Rejected("req_2", "overloaded", "full"),
            )
        ),
        {
            "t": "step",
            "events": [
                {
                    "t": "admitted",
                    "request_id": "req_1",
                    "grants": [GRANT_KEYS],
                    "tokens_reused": 1,
                },
                {"t": "committed", "request_id": "req_1", "tokens": 2},
                {"t": "tokens", "request_id": "req_1", "ids": [4, 5]},
                {
                    "t": "finished",
                    "request_id": "req_1",
                    "reason": "max_tokens",
                    "record": RECORD_KEYS,
                    "message": None,
                },
                {
                    "t": "rejected",
                    "request_id": "req_2",
                    "code": "overloaded",
                    "message": "full",
                },
            ],
        },
    ),
    (
        Found(1, {"req_1": RECORD, "req_2": None}),
        {"t": "found", "call": 1, "records": {"req_1": RECORD_KEYS, "req_2": None}},
    ),
    (
        RecentIds(3, ("req_2", "req_1")),
        {"t": "recent_ids", "call": 3, "request_ids": ["req_2", "req_1"]},
    ),
    (Gauges(2, {"g": 1.0}), {"t": "gauges", "call": 2, "gauges": {"g": 1.0}}),
    (Unpinned(3, 1), {"t": "unpinned", "call": 3, "num_leases": 1}),
    (Reports((REPORT,)), {"t": "reports", "reports": [REPORT_KEYS]}),
    (Fault("why"), {"t": "fault", "message": "why"}),
]


@pytest.mark.parametrize(("message", "data"), CLIENT_FRAMES)
def test_the_bytes_of_every_client_frame_are_pinned(message, data):
    assert encode_client(message) == frame(data)


@pytest.mark.parametrize(("message", "data"), ENGINE_FRAMES)
def test_the_bytes_of_every_engine_frame_are_pinned(message, data):
    assert encode_engine(message) == frame(data)


def test_every_kind_of_frame_has_its_bytes_pinned():
    assert {type(message) for message, _ in CLIENT_FRAMES} == set(get_args(ClientMessage))
    assert {type(message) for message, _ in ENGINE_FRAMES} == set(get_args(EngineMessage))
