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
    Finish,
    FrameReader,
    encode_client,
    encode_engine,
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
