"""The shape of a JSON body, measured on its bytes before any object is made of it.

A parsed value takes some fifty times the bytes that it was sent in, so a body is bounded by what it
holds, not by its size alone. No call here takes more than a few milliseconds, however long the body
is: other threads run between two of them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from gateway.errors import InvalidRequest

MAX_DEPTH = 64  # a conversation needs 7; a tool's JSON Schema adds 2 a level
MAX_VALUES = 100_000  # an agent's long session has 20,000: 2,000 messages, 100 tools
# In strings, escaped as they came: two million tokens, more than any model reads. Parsing takes up
# to 3.5 ms a megabyte, in one call.
MAX_TEXT_BYTES = 8_000_000

PIECE_BYTES = 64 << 10

_BRACKETS = b"[]{}"
_NO_STRUCTURE = bytes(set(range(256)) - set(_BRACKETS + b","))
_STEP = bytes.maketrans(_BRACKETS, b"\x02\x00\x02\x00")  # one more than what it adds to the depth


@dataclass(frozen=True, slots=True)
class JsonShape:
    """What a body holds: the values of its arrays and objects, their deepest nesting, its text.

    text_bytes  all that is between quotes, and the quotes
    """

    num_values: int
    depth: int
    text_bytes: int


def pieces_of(body: bytes | bytearray) -> Iterator[bytes]:
    """The body in pieces of PIECE_BYTES."""
    view = memoryview(body)
    return (bytes(view[i : i + PIECE_BYTES]) for i in range(0, len(body), PIECE_BYTES))


def measure(pieces: Iterable[bytes]) -> JsonShape:
    """Return the shape of the JSON document that the pieces make; stop at the first excess.

    Of what is no JSON, the part up to its first error is measured right, which is all of it that a
    parser can make objects of. Raises InvalidRequest.
    """
    num_values = depth = deepest = text_bytes = 0
    for structure, num_text_bytes in _structure(pieces):
        text_bytes += num_text_bytes
        num_opened = structure.count(b"[") + structure.count(b"{")
        num_values += num_opened + structure.count(b",")
        if num_values > MAX_VALUES:
            raise InvalidRequest(f"Invalid JSON: more than {MAX_VALUES} values")
        brackets = structure.translate(_STEP, b",")
        if deepest < depth + num_opened:
            deepest = max(deepest, depth + max(accumulate(brackets, _next_depth, initial=0)))
        depth += 2 * num_opened - len(brackets)
        if deepest > MAX_DEPTH:
            raise InvalidRequest(f"Invalid JSON: more than {MAX_DEPTH} levels deep")
        if text_bytes > MAX_TEXT_BYTES:
            raise InvalidRequest(f"prompt is too long: more than {MAX_TEXT_BYTES} bytes of text")
    return JsonShape(num_values, deepest, text_bytes)


def _next_depth(depth: int, step: int) -> int:
    return depth + step - 1


def _structure(pieces: Iterable[bytes]) -> Iterator[tuple[bytes, int]]:
    """Yield each piece's brackets and commas outside of strings, and its bytes in strings."""
    in_string = 0
    cut = b""  # half of an escape at the end of a piece
    for piece in pieces:
        text = cut + piece
        num_backslashes = len(text) - len(text.rstrip(b"\\"))
        cut = b"\\" * (num_backslashes % 2)
        text = text.removesuffix(cut) if cut else text
        num_bytes = len(text)
        if b"\\" in text:
            text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = text.split(b'"')
        outside = b"".join(parts[in_string::2])
        yield outside.translate(None, _NO_STRUCTURE), num_bytes - len(outside)
        in_string ^= (len(parts) - 1) % 2
