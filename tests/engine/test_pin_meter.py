import pytest

from engine.protocol import Breakpoint
from tests.engine.oracle import Bench, ask, small_config


def write(tokens: int, ttl_ms: int = 10_000) -> Breakpoint:
    return Breakpoint(tokens, ttl_ms, write=True)


def bench(**changes: object) -> Bench:
    return Bench(small_config(lease_grace_ms=0, **changes))


# A prompt is cut at its breakpoints, and each step of the bench takes one millisecond.


def totals(here: Bench) -> dict[int, tuple[int, int]]:
    """Idle and contended block-milliseconds by the length of the lease, at its last report."""
    reports = here.journal.reports
    return {r.num_tokens: (r.idle_block_ms, r.contended_block_ms) for r in reports}


def test_a_lease_pays_its_blocks_for_as_long_as_it_lives() -> None:
    here = bench()
    here.run(ask("writer", range(10), breakpoints=(write(10),)))

    here.step(advance_ms=20_000)

    (report,) = here.journal.reports
    assert (report.reason, report.request_id, report.num_tokens) == ("expired", "writer", 10)
    assert (report.idle_block_ms, report.contended_block_ms) == (3 * 20_000, 0)


def test_nested_leases_pay_a_shared_block_once() -> None:
    here = bench()
    here.run(ask("writer", range(20), breakpoints=(write(8, 30_000), write(16, 30_000))))

    here.step(advance_ms=40_000)

    assert totals(here) == {8: (2 * 40_002, 0), 16: (2 * 40_001, 0)}


def test_when_the_payer_ends_the_next_lease_of_the_block_pays() -> None:
    here = bench()
    here.run(ask("writer", range(20), breakpoints=(write(8, 10_000), write(16, 30_000))))

    here.step(advance_ms=10_000)
    here.step(advance_ms=20_000)

    assert totals(here) == {8: (2 * 10_002, 0), 16: (2 * 10_001 + 4 * 20_000, 0)}


def test_time_is_contended_once_a_warmer_block_was_evicted_and_idle_again_after_a_read() -> None:
    here = bench(num_blocks=32)
    here.run(ask("writer", range(8), breakpoints=(write(8, 100_000),)))
    here.step(advance_ms=1_000)
    for number in range(4):  # fills the pool more than once with colder and warmer prompts
        here.run(ask(f"other{number}", range(100 * number + 100, 100 * number + 160)))
    here.step(advance_ms=0)
    since_ms = here.now_ms
    here.step(advance_ms=5_000)

    here.run(ask("reader", range(12), breakpoints=(Breakpoint(8, 100_000, write=False),)))

    idle_ms, contended_ms = (block_ms // 2 for block_ms in totals(here)[8])
    assert contended_ms >= 5_000
    assert idle_ms + contended_ms == 6_000 + since_ms - 2_001 + 1
    here.step(advance_ms=3_000)
    here.core.stop(here.now_ms)
    assert totals(here)[8][0] // 2 >= idle_ms + 3_000


def test_who_uses_a_shorter_prefix_does_not_use_the_lease() -> None:
    here = bench(num_blocks=32)
    here.run(ask("writer", range(8), breakpoints=(write(8, 100_000),)))
    for number in range(4):
        here.run(ask(f"other{number}", range(100 * number + 100, 100 * number + 160)))
        here.run(ask(f"shorter{number}", [*range(4), *range(900, 910)]))

    here.step(advance_ms=5_000)
    here.core.stop(here.now_ms)

    assert totals(here)[8][1] // 2 >= 5_000


@pytest.mark.parametrize("num_blocks", [32, 200])
def test_an_unused_pool_is_never_contended(num_blocks: int) -> None:
    here = bench(num_blocks=num_blocks)
    here.run(ask("writer", range(8), breakpoints=(write(8, 100_000),)))

    here.run(ask("other", range(200, 240)))
    here.step(advance_ms=200_000)

    assert totals(here)[8][1] == 0
