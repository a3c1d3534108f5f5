import re
from typing import Any

import pytest

from gateway.errors import InvalidRequest
from gateway.prompts.breakpoints import CacheBreakpoint, Marker, effective_breakpoints, read_markers
from gateway.prompts.conversation import read_blocks
from tests.gateway.bodies import EPHEMERAL, EPHEMERAL_1H, read, text, turn
from tests.gateway.word_template import WordTemplate


def markers_of(**fields: Any) -> tuple[Marker, ...]:
    request = read(**fields)
    return read_markers(read_blocks(request), automatic=request.cache_control)


def marked(words: str, control: dict[str, str] = EPHEMERAL) -> dict[str, Any]:
    return text(words, cache_control=control)


def test_markers_stand_in_block_order_with_their_class() -> None:
    markers = markers_of(
        system=[text("a"), marked("b", EPHEMERAL_1H)],
        messages=[turn("user", text("c"), marked("d", {"type": "ephemeral", "ttl": "5m"}))],
    )

    assert markers == (
        Marker(1, "1h", "system.1.cache_control"),
        Marker(3, "5m", "messages.0.content.1.cache_control"),
    )


def test_m09_four_markers_is_the_limit_the_automatic_one_included() -> None:
    five = [marked("x") for _ in range(5)]

    assert len(markers_of(system=five[:4])) == 4
    wording = re.escape("A maximum of 4 blocks with cache_control may be provided. Found 5.")
    with pytest.raises(InvalidRequest, match=wording):
        markers_of(system=five)
    with pytest.raises(InvalidRequest, match=wording):
        markers_of(system=five[:4], cache_control=EPHEMERAL)


def test_m08_a_longer_ttl_after_a_shorter_one_is_refused_by_its_path() -> None:
    wording = (
        "messages.0.content.0.cache_control.ttl: a ttl='1h' cache_control block must not come "
        "after a ttl='5m' cache_control block"
    )

    with pytest.raises(InvalidRequest, match=re.escape(wording)):
        markers_of(system=[marked("a")], messages=[turn("user", marked("b", EPHEMERAL_1H))])


def test_automatic_caching_marks_the_last_block() -> None:
    markers = markers_of(system=[marked("a", EPHEMERAL_1H)], cache_control=EPHEMERAL)

    assert markers[-1] == Marker(1, "5m", "cache_control")


def test_automatic_caching_obeys_the_ttl_order() -> None:
    with pytest.raises(InvalidRequest, match=r"^cache_control\.ttl: a ttl='1h'"):
        markers_of(system=[marked("a")], cache_control=EPHEMERAL_1H)


def test_m11_automatic_caching_of_a_marked_block_is_one_marker_or_a_conflict() -> None:
    last_marked = [turn("user", *[marked("a") for _ in range(4)])]

    assert len(markers_of(messages=last_marked, cache_control=EPHEMERAL)) == 4
    with pytest.raises(InvalidRequest, match="already marked with ttl='5m'"):
        markers_of(messages=last_marked, cache_control=EPHEMERAL_1H)


def test_m04_a_short_prefix_is_inert() -> None:
    blocks = read_blocks(read(system=[marked("a b"), marked("c")]))
    markers = read_markers(blocks)

    breakpoints = effective_breakpoints(markers, WordTemplate().render(blocks), min_tokens=3)

    assert breakpoints == (CacheBreakpoint(1, 3, "5m"),)


def test_two_markers_on_one_prefix_make_one_breakpoint() -> None:
    blocks = read_blocks(read(system=[marked("a b", EPHEMERAL_1H), marked(" ")]))
    markers = read_markers(blocks)

    breakpoints = effective_breakpoints(markers, WordTemplate().render(blocks), min_tokens=1)

    assert breakpoints == (CacheBreakpoint(1, 2, "5m"),)
