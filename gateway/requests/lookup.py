"""Cache lookup: which entries a prompt reads (twenty-position lookback), and which it writes.

An entry is found only where one was written, never because the text before it happens to be the
same. Source: the Messages API's rules on lookback, mixed TTLs and refresh.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from billing.entries import Entry, PendingEntry
from billing.meters import WritePoint
from gateway.prompts.breakpoints import CacheBreakpoint

LOOKBACK_POSITIONS = 20  # how many blocks a breakpoint looks back over, itself included


@dataclass(frozen=True, slots=True)
class CacheMatch:
    """What a lookup found.

    read_tokens   A: the prefix billed as a read; 0 without a hit
    read_entries  the live entries up to A, the hit last: each is refreshed by this read
    writes        one for each effective breakpoint above A
    """

    read_tokens: int
    read_entries: tuple[Entry, ...]
    writes: tuple[WritePoint, ...]


def keys_to_look_up(
    entry_keys: Sequence[str], breakpoints: Sequence[CacheBreakpoint]
) -> tuple[str, ...]:
    """The keys that can matter: those up to the last breakpoint; without one there are none."""
    if not breakpoints:
        return ()
    return tuple(entry_keys[: breakpoints[-1].block + 1])


def match_entries(
    entry_keys: Sequence[str], breakpoints: Sequence[CacheBreakpoint], live: Mapping[str, Entry]
) -> CacheMatch:
    """Match a prompt, by the key of each of its blocks, against the live entries.

    `breakpoints` are the effective ones, ascending.
    """
    hit = _highest_hit(entry_keys, breakpoints, live)
    matched_path = () if hit is None else entry_keys[: hit + 1]
    read_tokens = 0 if hit is None else live[entry_keys[hit]].num_tokens
    # Two blocks have one key if the second holds no token: an entry is still read once.
    read_entries = {key: live[key] for key in matched_path if key in live}
    return CacheMatch(
        read_tokens=read_tokens,
        read_entries=tuple(read_entries.values()),
        writes=tuple(
            WritePoint(point.num_tokens, point.ttl_class, entry_keys[point.block])
            for point in breakpoints
            if point.num_tokens > read_tokens
        ),
    )


def entries_to_wait_for(
    entry_keys: Sequence[str],
    breakpoints: Sequence[CacheBreakpoint],
    *,
    live: Mapping[str, Entry],
    pending: Sequence[PendingEntry],
) -> list[PendingEntry]:
    """The pending entries that would be the hit if they were live, if that is a better one.

    Several, if several requests write the same prefix.
    """
    hit = _highest_hit(entry_keys, breakpoints, live.keys() | {entry.key for entry in pending})
    if hit is None or entry_keys[hit] in live:
        return []
    return [entry for entry in pending if entry.key == entry_keys[hit]]


def _highest_hit(
    entry_keys: Sequence[str], breakpoints: Sequence[CacheBreakpoint], found: Container[str]
) -> int | None:
    for point in reversed(breakpoints):
        for block in range(point.block, max(-1, point.block - LOOKBACK_POSITIONS), -1):
            if entry_keys[block] in found:
                return block
    return None
