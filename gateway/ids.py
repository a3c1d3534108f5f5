"""Ids: a prefix and a UUIDv7, so that later ids sort after earlier ones."""

import secrets
from collections.abc import Callable


def id_maker(
    now_ms: Callable[[], int], random_bytes: Callable[[int], bytes] = secrets.token_bytes
) -> Callable[[str], str]:
    """Make `new_id`: "req" becomes "req_" and 32 hex digits.

    Source: RFC 9562, section 5.7 (48 bits of milliseconds, version, variant, 74 random bits).
    """

    def new_id(prefix: str) -> str:
        value = now_ms() << 80 | int.from_bytes(random_bytes(10), "big")
        value = value & ~(0xF << 76) | 0x7 << 76
        value = value & ~(0x3 << 62) | 0x2 << 62
        return f"{prefix}_{value:032x}"

    return new_id
