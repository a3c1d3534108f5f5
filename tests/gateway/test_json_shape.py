"""A body is measured before it is parsed, and no further than it may be long."""

import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import InvalidRequest
from gateway.http.json_shape import (
    MAX_DEPTH,
    MAX_TEXT_BYTES,
    MAX_VALUES,
    PIECE_BYTES,
    measure,
    pieces_of,
)

texts = st.text('ab"\\[]{},:\n\u20ac', max_size=8)
documents = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=30,
)


def shape_of(value: object, depth: int = 0) -> tuple[int, int]:
    """What `measure` should find: containers and the elements after their first; the depth."""
    if not isinstance(value, list | dict):
        return 0, depth
    inner = list(value.values()) if isinstance(value, dict) else value
    shapes = [shape_of(item, depth + 1) for item in inner]
    num_values = 1 + max(0, len(inner) - 1) + sum(num for num, _ in shapes)
    return num_values, max([depth + 1, *(deep for _, deep in shapes)])


@given(document=documents, size=st.integers(1, 7), as_ascii=st.booleans())
def test_the_shape_is_the_documents_however_it_was_cut(
    document: object, size: int, as_ascii: bool
) -> None:
    body = json.dumps(document, ensure_ascii=as_ascii).encode()

    found = measure(body[i : i + size] for i in range(0, len(body), size))

    assert (found.num_values, found.depth) == shape_of(document)


def test_depth_and_values_at_their_limits_are_accepted_and_one_more_is_not() -> None:
    deep = b"[" * MAX_DEPTH
    long = b"[" + b"," * (MAX_VALUES - 1)

    assert measure([deep]).depth == MAX_DEPTH
    assert measure([long]).num_values == MAX_VALUES
    with pytest.raises(InvalidRequest, match="64 levels"):
        measure([deep + b"["])
    with pytest.raises(InvalidRequest, match="100000 values"):
        measure([long + b","])


@pytest.mark.parametrize(
    "character", [b"a", b"\\n", b'\\"', b"\\\\"], ids=["plain", "n", "quote", "slash"]
)
def test_text_is_counted_as_it_was_sent(character: bytes) -> None:
    text = b'{"a":"' + character * 50_000 + b'"}'

    assert measure(pieces_of(text)).text_bytes == len(text) - len(b"{:}")


def test_text_has_a_limit() -> None:
    with pytest.raises(
        InvalidRequest, match=r"^prompt is too long: more than 8000000 bytes of text"
    ):
        measure([b'"', b"a" * MAX_TEXT_BYTES])


def test_depth_is_the_deepest_not_the_last() -> None:
    with pytest.raises(InvalidRequest, match="levels"):
        measure([b"[" * 40, b"[" * 25 + b"]" * 65])


@pytest.mark.parametrize(
    "unit",
    [b"[[[[]]]],", b"[],", b'{"type":"text","text":"a"},', b'"key":1,', b"[", b'{"a":'],
    ids=["nested tools", "system", "text blocks", "keys", "opened lists", "opened objects"],
)
def test_a_body_past_a_limit_is_read_no_further(unit: bytes) -> None:
    read: list[int] = []

    def endless() -> Iterator[bytes]:
        while True:
            read.append(PIECE_BYTES)
            yield (unit * (PIECE_BYTES // len(unit) + 1))[:PIECE_BYTES]

    with pytest.raises(InvalidRequest):
        measure(endless())

    assert sum(read) <= MAX_VALUES * len(unit) + 2 * PIECE_BYTES


def test_pieces_are_the_body() -> None:
    body = bytes(range(256)) * 1_000

    assert b"".join(pieces_of(body)) == body
    assert max(map(len, pieces_of(body))) == PIECE_BYTES
