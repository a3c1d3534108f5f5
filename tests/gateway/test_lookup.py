"""Which entries a prompt reads and writes, against an independent restatement of the rules."""

from dataclasses import dataclass, field
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from billing.entries import Entry, PendingEntry
from billing.meters import Quantities, split
from gateway.prompts.breakpoints import CacheBreakpoint
from gateway.requests.lookup import entries_to_wait_for, keys_to_look_up, match_entries
from tests.gateway.cache_oracle import TTL_MS, Oracle

MIN_TOKENS = 5


@dataclass
class Store:
    """The gateway's side: keys, entries, and the code under test."""

    entries: dict[str, Entry] = field(default_factory=dict)

    def bill(self, blocks: list[tuple[str, int]], marks: dict[int, str], now_ms: int) -> Quantities:
        ends = [sum(tokens for _, tokens in blocks[: i + 1]) for i in range(len(blocks))]
        keys = [
            sha256(repr([c for c, _ in blocks[: i + 1]]).encode()).hexdigest()
            for i in range(len(blocks))
        ]
        points = [
            CacheBreakpoint(i, ends[i], ttl) for i, ttl in marks.items() if ends[i] >= MIN_TOKENS
        ]
        live = {
            key: self.entries[key]
            for key in keys_to_look_up(keys, points)
            if key in self.entries and self.entries[key].expires_at_ms > now_ms
        }
        match = match_entries(keys, points, live)
        for entry in match.read_entries:
            self._put(entry.key, entry.num_tokens, entry.ttl_class, now_ms)
        for write in match.writes:
            self._put(write.entry_key, write.num_tokens, write.ttl_class, now_ms)
        return split(total_tokens=ends[-1], read_tokens=match.read_tokens, writes=match.writes)

    def _put(self, key: str, tokens: int, ttl_class: str, now_ms: int) -> None:
        ttl_ms = TTL_MS[ttl_class]
        self.entries[key] = Entry(key, tokens, ttl_class, ttl_ms, now_ms + ttl_ms)


@st.composite
def requests(draw: st.DrawFn) -> tuple[int, list[tuple[str, int]], dict[int, str]]:
    """Seconds since the last one, blocks that often begin alike, and 1h marks before 5m ones."""
    num_blocks = draw(st.integers(1, 45))
    changed_from = draw(st.integers(0, num_blocks) | st.just(num_blocks))
    variant = draw(st.sampled_from("ab"))
    blocks = [(f"{i}{variant if i >= changed_from else ''}", 1 + i % 3) for i in range(num_blocks)]
    marked = sorted(draw(st.sets(st.integers(0, num_blocks - 1), max_size=4)))
    num_long = draw(st.integers(0, len(marked)))
    marks = {i: "1h" if at < num_long else "5m" for at, i in enumerate(marked)}
    return draw(st.sampled_from([0, 1, 200, 299, 300, 301, 3600])), blocks, marks


@settings(max_examples=300, deadline=None)
@given(st.lists(requests(), min_size=1, max_size=8))
def test_every_request_of_a_sequence_is_split_as_the_rules_say(sequence):
    oracle, store, now_ms = Oracle(MIN_TOKENS), Store(), 0
    for seconds, blocks, marks in sequence:
        now_ms += seconds * 1000

        billed = store.bill(blocks, marks, now_ms)

        assert billed == oracle.bill(blocks, marks, now_ms)
        assert billed.prompt == sum(tokens for _, tokens in blocks)


def test_without_a_breakpoint_nothing_is_looked_up():
    assert keys_to_look_up(["a", "b"], []) == ()
    assert match_entries(["a", "b"], [], {}).read_tokens == 0


@pytest.mark.parametrize(("blocks_later", "found"), [(19, True), (20, False)])
def test_a_breakpoint_sees_twenty_blocks_itself_included(blocks_later: int, found: bool):
    keys = [f"k{i}" for i in range(30)]
    entry = Entry("k5", 6, "5m", 300_000, 300_000)
    point = CacheBreakpoint(5 + blocks_later, 6 + blocks_later, "5m")

    match = match_entries(keys, [point], {"k5": entry})

    assert match.read_tokens == (6 if found else 0)
    assert match.read_entries == ((entry,) if found else ())
    assert [write.num_tokens for write in match.writes] == [6 + blocks_later]


def pending(key: str, request_id: str = "req_1") -> PendingEntry:
    return PendingEntry(key, 10, request_id, "gw_one")


def awaited(live: list[str], *pending_entries: PendingEntry) -> list[str]:
    """Who is waited for, of a prompt of 30 blocks with breakpoints on the 6th and the last."""
    keys = [f"k{i}" for i in range(30)]
    entries = {key: Entry(key, 10, "5m", 300_000, 300_000) for key in live}
    points = [CacheBreakpoint(5, 6, "5m"), CacheBreakpoint(29, 30, "5m")]
    found = entries_to_wait_for(keys, points, live=entries, pending=pending_entries)
    return [entry.request_id for entry in found]


def test_only_an_entry_that_would_be_the_hit_is_waited_for():
    assert awaited([], pending("k20")) == ["req_1"]
    assert awaited([], pending("k4")) == ["req_1"]
    assert awaited([], pending("k7")) == [], "Out of every breakpoint's sight."
    assert awaited(["k21"], pending("k20")) == []
    assert awaited(["k20"], pending("k21")) == ["req_1"]
    assert awaited(["k21"], pending("k21")) == []
    assert awaited(["k21"], pending("k4")) == []
    assert awaited([]) == []


def test_all_writers_of_the_one_prefix_are_waited_for_and_no_others():
    assert awaited([], pending("k9"), pending("k21", "req_2"), pending("k21", "req_3")) == [
        "req_2",
        "req_3",
    ]
