"""The split of a prompt: the invariants I1 to I4 of docs/cases/messages-api.md, and examples."""

from hypothesis import given
from hypothesis import strategies as st

from billing.meters import Quantities, WritePoint, split

layouts = st.builds(
    lambda cuts, classes: [
        WritePoint(tokens, ttl, str(tokens))
        for tokens, ttl in zip(sorted(cuts), classes, strict=False)
    ],
    st.sets(st.integers(1, 500), max_size=4),
    st.lists(st.sampled_from(["5m", "1h"]), min_size=4, max_size=4),
)


@given(layouts, st.integers(0, 500), st.integers(500, 600))
def test_i1_and_i2_the_meters_add_up_whatever_the_markers(
    writes: list[WritePoint], read: int, total: int
) -> None:
    quantities = split(total_tokens=total, read_tokens=read, writes=writes, output_tokens=7)

    assert quantities.prompt == total
    assert quantities.cache_read == read
    last = max((write.num_tokens for write in writes if write.num_tokens > read), default=read)
    assert quantities.cache_write_5m + quantities.cache_write_1h == last - read
    assert min(quantities.input, quantities.cache_write_5m, quantities.cache_write_1h) >= 0


@given(st.integers(1, 600))
def test_i3_without_a_marker_everything_is_input(total: int) -> None:
    assert split(total_tokens=total, read_tokens=0, writes=[]) == Quantities(input=total)


@given(layouts, st.integers(0, 500))
def test_i4_more_markers_before_the_last_one_change_nothing(
    writes: list[WritePoint], read: int
) -> None:
    same_class = [WritePoint(write.num_tokens, "5m", write.entry_key) for write in writes]

    many = split(total_tokens=600, read_tokens=read, writes=same_class)

    assert many == split(total_tokens=600, read_tokens=read, writes=same_class[-1:])


def test_a_long_write_before_a_short_one() -> None:
    writes = [WritePoint(1_000, "1h", "a"), WritePoint(3_000, "5m", "b")]

    assert split(total_tokens=3_010, read_tokens=400, writes=writes) == Quantities(
        input=10, cache_read=400, cache_write_5m=2_000, cache_write_1h=600
    )
