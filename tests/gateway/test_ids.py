import uuid

from gateway.ids import id_maker


def test_an_id_is_a_prefix_and_a_version_7_uuid() -> None:
    new_id = id_maker(lambda: 1_772_366_400_000)

    prefix, _, digits = new_id("req").partition("_")

    made = uuid.UUID(hex=digits)
    assert prefix == "req"
    assert (made.version, made.variant) == (7, uuid.RFC_4122)
    assert made.int >> 80 == 1_772_366_400_000


def test_chance_fills_every_other_bit() -> None:
    none = id_maker(lambda: 0, lambda length: b"\x00" * length)("x")
    all_ = id_maker(lambda: 0, lambda length: b"\xff" * length)("x")

    assert none == "x_00000000000070008000000000000000"
    assert all_ == "x_0000000000007fffbfffffffffffffff"


def test_later_ids_sort_after_earlier_ones() -> None:
    ticks = iter(range(1_000))
    new_id = id_maker(lambda: next(ticks))

    made = [new_id("req") for _ in range(1_000)]

    assert made == sorted(made)
