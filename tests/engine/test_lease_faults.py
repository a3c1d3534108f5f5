"""What broke in other engines around leases and tiers, by its row in docs/cases/engine.md."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from engine.blocks.prefix_index import TOKEN_DTYPE, PrefixChain
from engine.compute.loading import load_model
from engine.errors import ModelFileError
from engine.lease_types import Lease, owner_of
from engine.protocol import Breakpoint, EngineRecord, Finished
from engine.tiers.lease_store import LeaseStore
from engine.tiers.tier import Costs
from tests.engine.oracle import Bench, OracleRunner, ask, small_config
from tests.engine.slot_tier import ALWAYS_PAYS, SlotTier, slot_store
from tests.engine.tiny_model import CONFIG, tiny_tensors, write_tiny_model


def write(tokens: int, ttl_ms: int = 60_000, *, persist: bool = True) -> Breakpoint:
    return Breakpoint(tokens, ttl_ms, write=True, persist=persist)


def read(tokens: int, ttl_ms: int = 60_000) -> Breakpoint:
    return Breakpoint(tokens, ttl_ms, write=False, persist=True)


def bench(*tiers: SlotTier, costs: Costs = ALWAYS_PAYS, **changes: object) -> Bench:
    config = small_config(lease_grace_ms=0, **changes)
    return Bench(config, store=lambda runner: slot_store(runner, *tiers, costs=costs))


def record_of(events) -> EngineRecord:
    (end,) = [event for event in events if isinstance(event, Finished)]
    assert end.record is not None
    return end.record


def crowd(here: Bench, *, until: str | None = None) -> None:
    """Long prompts that use every block that is not pinned, until a counter says so."""
    for number in range(12):
        start = 100 + 70 * number
        here.run(ask(f"crowd{here.now_ms}-{number}", range(start, start + 60), max_tokens=20))
        if until is not None and here.core.stats()[until]:
            return


def squeeze(here: Bench) -> None:
    """Two prompts at once that need the pinned blocks too."""
    for number in range(2):
        here.submit(ask(f"big{number}", range(500 + number * 60, 540 + number * 60), max_tokens=20))
    here.drain()
    crowd(here)


def test_a_lease_is_not_given_up_when_that_frees_no_block() -> None:
    here = bench(
        SlotTier("disk"),
        num_blocks=32,
        pin_cap_blocks=16,
        namespace_quota_blocks=16,
        max_model_len=64,
        min_shared_tokens=1_000,
    )
    tenants = [b"tenant %d" % number for number in range(4)]
    documents = [range(100 * number, 100 * number + 16) for number in range(4)]
    for number in range(4):
        asked = ask(f"w{number}", documents[number], namespace=tenants[number], max_tokens=0)
        here.run(replace(asked, breakpoints=(write(16, 1_000_000),)))
    here.step()
    for number in range(4):  # every leased block is in use while blocks run out
        prompt = [*documents[number], 7]
        asked = ask(f"d{number}", prompt, namespace=tenants[number], max_tokens=44)
        here.submit(replace(asked, ignore_eos=True))

    before = here.core.stats()
    while here.core.has_work:
        here.step()
        after = here.core.stats()
        grown = {name for name in after if after[name] > before[name]}
        assert not {"lease_given_up_total", "preemptions_total"} <= grown
        before = after

    assert before["preemptions_total"] > 0


def test_leases_that_end_together_are_ended_over_several_steps() -> None:
    here = bench(
        num_blocks=700,
        pin_cap_blocks=640,
        namespace_quota_blocks=640,
        max_num_batched_tokens=4_000,
        max_queue=600,
        max_num_seqs=600,
    )
    for number in range(600):
        prompt = [number, *range(3)]
        here.submit(ask(f"w{number}", prompt, max_tokens=0, breakpoints=(write(4, 1_000),)))
    here.drain()
    assert here.core.stats()["leases_live"] == 600

    live = []
    here.now_ms += 10_000
    for _ in range(3):
        here.step()
        live.append(here.core.stats()["leases_live"])

    assert live == [344, 88, 0]


def test_a_lease_that_is_due_is_not_refreshed_while_it_waits_for_its_end() -> None:
    here = bench(
        num_blocks=700,
        pin_cap_blocks=640,
        namespace_quota_blocks=640,
        max_num_batched_tokens=4_000,
        max_queue=600,
        max_num_seqs=600,
    )
    for number in range(600):
        prompt = [number, *range(3)]
        here.submit(ask(f"w{number}", prompt, max_tokens=0, breakpoints=(write(4, 1_000),)))
    here.drain()

    here.now_ms += 10_000
    here.submit(ask("late", [599, *range(3)], max_tokens=0, breakpoints=(write(4, 1_000),)))

    (end,) = [event for event in here.step() if isinstance(event, Finished)]
    assert end.record is not None
    assert [grant.outcome for grant in end.record.grants] == ["granted"]


def test_row_01_a_pinned_prefix_outlives_any_pressure_until_its_ttl() -> None:
    here = bench()
    here.run(ask("writer", range(10), breakpoints=(write(10, 5_000),)))

    crowd(here)
    within = record_of(here.run(ask("within", range(20), read_tokens=10)))
    here.step(advance_ms=5_000)
    crowd(here)
    after = record_of(here.run(ask("after", range(20))))

    assert (within.tokens_reused_promised, within.tokens_read_recomputed) == (10, 0)
    assert after.tokens_reused_gift == 0


def test_row_02_a_device_copy_is_soft_once_the_lease_is_whole_below() -> None:
    tier = SlotTier()
    here = bench(tier, num_blocks=24, pin_cap_blocks=4)
    here.run(ask("writer", range(14), breakpoints=(write(14),)))

    squeeze(here)
    assert here.core.stats()["lease_given_up_total"] == 1
    assert here.core.stats()["kv_blocks_pinned"] == 0
    reader = ask("reader", range(20), read_tokens=14, breakpoints=(read(14, 90_000),))
    record = record_of(here.run(reader))

    assert record.reads_by_tier == {"disk": 14}
    assert (record.tokens_reused_promised, record.tokens_read_recomputed) == (14, 0)
    assert [grant.outcome for grant in record.grants] == ["refreshed"]
    assert here.core.next_expiry_ms() > here.now_ms + 80_000


def test_row_02_a_promise_that_is_whole_below_leaves_its_quota_to_new_ones() -> None:
    here = bench(SlotTier(), pin_cap_blocks=4, namespace_quota_blocks=4)

    outcomes = [
        record_of(here.run(ask(f"writer{n}", range(50 * n, 50 * n + 16), breakpoints=(write(16),))))
        for n in range(3)
    ]
    refused = record_of(here.run(ask("long", range(300, 320), breakpoints=(write(20),))))

    assert [record.grants[0].outcome for record in outcomes] == ["granted"] * 3
    assert here.core.stats()["leases_live"] == 3
    assert refused.grants[0].reason == "quota"


def test_row_03_a_lease_outlives_its_request_and_is_created_once() -> None:
    here = bench(SlotTier())

    first = record_of(here.run(ask("first", range(12), breakpoints=(write(12),))))
    second = record_of(here.run(ask("second", range(12), breakpoints=(write(12),))))

    assert [first.grants[0].outcome, second.grants[0].outcome] == ["granted", "refreshed"]
    assert first.grants[0].lease_id == second.grants[0].lease_id is not None
    assert here.core.stats()["kv_blocks_pinned"] == 3


def test_row_04_unpinning_twice_is_unpinning_once() -> None:
    tier = SlotTier()
    here = bench(tier)
    record = record_of(here.run(ask("writer", range(12), breakpoints=(write(8), write(12)))))
    first_id, _ = (grant.lease_id for grant in record.grants)

    ended = [
        here.core.end_leases(lease_ids=[first_id], now_ms=here.now_ms),
        here.core.end_leases(lease_ids=[first_id, "unknown"], now_ms=here.now_ms),
        here.core.end_leases(namespaces=[b"nobody"], now_ms=here.now_ms),
        here.core.end_leases(namespaces=[b"tenant-a"], now_ms=here.now_ms),
        here.core.end_leases(namespaces=[b"tenant-a"], now_ms=here.now_ms),
    ]

    here.core.check_integrity()
    assert ended == [1, 0, 0, 1, 0]
    assert (here.core.stats()["kv_blocks_pinned"], tier.kept) == (0, {})
    assert [report.reason for report in here.core.take_reports()] == ["unpinned"] * 2


def test_row_04_a_lease_that_is_never_read_ends_by_itself() -> None:
    tier = SlotTier()
    here = bench(tier)
    here.run(ask("writer", range(12), breakpoints=(write(12, 1_000),)))

    assert here.core.next_expiry_ms() is not None
    here.step(advance_ms=1_000)

    assert (here.core.stats()["kv_blocks_pinned"], tier.kept) == (0, {})
    assert here.core.next_expiry_ms() is None


def constant_digest(_data: bytes) -> bytes:
    return b"\0" * 32


@pytest.mark.parametrize(("namespace", "first"), [(b"other", 0), (b"tenant", 1)])
def test_row_05_a_hash_collision_restores_nobody_elses_lease(namespace: bytes, first: int) -> None:
    tier = SlotTier()
    store = LeaseStore(
        [tier], costs=ALWAYS_PAYS, snapshot=lambda blocks, num_tokens: "kv", block_size=4
    )
    own = PrefixChain(b"tenant", np.arange(12, dtype=TOKEN_DTYPE), 4, constant_digest)
    prefix = own.at(10)
    lease = Lease("l", 0, "r", owner_of(b"tenant"), prefix.key, 10, (1, 2, 3), 99, persist=True)
    store.save(lease, prefix, spare=())
    store.poll()
    assert store.find(own, 12, matched=0) == prefix.key

    tokens = np.arange(first, first + 12, dtype=TOKEN_DTYPE)
    colliding = PrefixChain(namespace, tokens, 4, constant_digest)

    assert store.find(colliding, 12, matched=0) is None


def test_row_06_a_prefix_on_disk_is_not_another_tenants_read() -> None:
    here = bench(SlotTier())
    here.run(ask("writer", range(14), breakpoints=(write(14),)))
    here.step()
    here.boot()

    other = ask("other", range(20), namespace=b"tenant-b", read_tokens=14, breakpoints=(read(14),))
    theirs = record_of(here.run(other))
    own = record_of(here.run(ask("own", range(20), read_tokens=14, breakpoints=(read(14),))))

    assert (theirs.reads_by_tier, theirs.tokens_read_recomputed) == ({}, 14)
    assert own.reads_by_tier == {"disk": 14}
    rejected = here.submit(ask("nobody", range(20), namespace=b""))
    assert rejected.code == "invalid_request"


def test_row_07_namespaces_that_join_to_the_same_bytes_are_two() -> None:
    assert owner_of(b"ab") != owner_of(b"a") != owner_of(b"")
    here = bench(SlotTier())
    here.run(ask("writer", range(14), namespace=b"ab", breakpoints=(write(14),)))
    here.step()
    here.boot()

    for namespace in (b"a", b"b", b"abc", b"ab\0"):
        record = record_of(here.run(ask(f"as {namespace!r}", range(20), namespace=namespace)))
        assert record.reads_by_tier == {}


def test_row_08_a_restored_read_is_counted_once_however_often_it_is_preempted() -> None:
    tier = SlotTier()
    here = bench(tier, num_blocks=20, pin_cap_blocks=4, max_num_seqs=3)
    here.run(ask("writer", range(14), breakpoints=(write(14),)))
    here.step()
    here.boot()
    for number in range(2):
        here.submit(ask(f"old{number}", range(200 + 30 * number, 220 + 30 * number), max_tokens=30))
    here.submit(ask("reader", range(20), read_tokens=14, max_tokens=30, breakpoints=(read(14),)))

    events = here.drain()

    ends = [event for event in events if isinstance(event, Finished)]
    (record,) = [end.record for end in ends if end.request_id == "reader"]
    assert record.num_preemptions > 0
    assert record.reads_by_tier == {"disk": 14}
    assert record.tokens_reused_promised == 14


def test_row_09_a_copy_that_turns_out_damaged_was_not_read() -> None:
    tier = SlotTier()
    here = bench(tier)
    here.run(ask("writer", range(14), breakpoints=(write(14),)))
    here.step()
    here.boot()
    tier.load = lambda key: None

    record = record_of(here.run(ask("reader", range(20), read_tokens=14, breakpoints=(read(14),))))

    assert (record.reads_by_tier, record.tokens_read_recomputed) == ({}, 14)
    assert here.core.stats()["lease_lost_total"] == 1
    assert record.grants[0].outcome == "granted", "restored at our cost"
    assert [report.reason for report in here.core.take_reports()] == ["lost"]


def test_row_25_a_copy_keeps_what_was_there_at_the_commit() -> None:
    tier = SlotTier()
    here = bench(tier, num_blocks=24, pin_cap_blocks=8)
    here.submit(ask("writer", range(14), max_tokens=30, breakpoints=(write(14),)))
    while not tier.kept:
        here.step()
    ((_, payload, _, _),) = tier.kept.values()
    at_commit = [list(block) for block in payload]

    here.drain()  # the writer goes on in the lease's last block
    here.core.end_leases(namespaces=[b"nobody"], now_ms=here.now_ms)
    squeeze(here)

    assert payload == at_commit
    assert payload[-1][2:] == [None, None], "what follows a lease is not part of it"


def test_row_26_a_failed_step_publishes_nothing_of_what_it_loaded() -> None:
    tier = SlotTier()
    here = bench(tier)
    here.run(ask("writer", range(14), breakpoints=(write(14),)))
    here.step()
    here.boot()
    here.runner.fails_loading = True
    here.submit(ask("fails", range(20), read_tokens=14, breakpoints=(read(14),)))
    (_, end) = here.step()
    here.runner.fails_loading = False
    assert end.reason == "error"
    assert here.core.stats()["kv_blocks_evictable"] == 0

    record = record_of(here.run(ask("next", range(20), read_tokens=14, breakpoints=(read(14),))))

    assert (record.reads_by_tier, tier.num_loads) == ({"disk": 14}, 2)


def test_a_lease_whose_copy_fails_stays_in_the_pool_and_is_counted() -> None:
    tier = SlotTier(keeps_all=True)

    def store(runner: OracleRunner) -> LeaseStore:
        return LeaseStore([tier], costs=ALWAYS_PAYS, snapshot=out_of_memory, block_size=4)

    here = Bench(small_config(), store=store)

    here.run(ask("writer", range(14), breakpoints=(write(14),)))

    stats = here.core.stats()
    assert (stats["lease_saves_skipped_total"], stats["leases_live"], tier.kept) == (1, 1, {})
    record = record_of(here.run(ask("reader", range(20), read_tokens=14)))
    assert record.tokens_reused_promised == 14


def out_of_memory(_blocks: object, _num_tokens: int) -> None:
    raise RuntimeError("CUDA out of memory")


def test_row_26_who_was_resumed_beyond_the_budget_of_a_failed_step_ends_with_it() -> None:
    here = bench(SlotTier(), max_num_batched_tokens=8)
    here.run(ask("writer", range(14), breakpoints=(write(14),)))
    here.step()
    here.submit(ask("long", range(300, 360), breakpoints=(write(4),)))  # leaves half a budget once
    here.submit(ask("reader", range(20), read_tokens=14, max_tokens=9))
    here.step()
    scheduler = here.core.scheduler
    pool = scheduler.tables.pool
    scheduler._preempt(scheduler.running[-1])
    next(here.core.leases.unpin_spare(), None)
    pool.release([pool.allocate() for _ in range(pool.num_free)])
    here.runner.fails = True
    num_plans = len(here.runner.plans)

    events = here.step()

    plan = here.runner.plans[num_plans]
    assert plan.loads
    assert [row.request_id for row in plan.rows] == ["long"], "the budget was large enough"
    assert {event.request_id for event in events if isinstance(event, Finished)} == {
        "long", "reader",
    }  # fmt: skip
    assert not here.core.has_work


def test_row_26_an_abort_right_after_a_restore_leaves_a_whole_cache() -> None:
    here = bench(SlotTier())
    here.run(ask("writer", range(14), breakpoints=(write(14),)))
    here.step()
    here.boot()
    here.submit(ask("leaves", range(20), read_tokens=14, max_tokens=9, breakpoints=(read(14),)))
    here.step()
    here.core.abort("leaves")
    here.drain()

    record = record_of(here.run(ask("next", range(20), read_tokens=14)))

    assert record.reads_by_tier == {"device": 19}


def test_row_26_two_readers_in_one_step_both_restore() -> None:
    here = bench(SlotTier())
    here.run(ask("writer", range(14), breakpoints=(write(14),)))
    here.step()
    here.boot()
    for number in range(2):
        here.submit(ask(f"reader{number}", [*range(14), number], read_tokens=14))

    ends = [event for event in here.drain() if isinstance(event, Finished)]

    assert [end.record.reads_by_tier for end in ends] == [{"disk": 14}] * 2


@pytest.mark.parametrize("change", ["missing", "unknown"])
def test_row_28_a_model_with_a_tensor_too_few_or_too_many_does_not_load(tmp_path, change) -> None:
    folder = write_tiny_model(tmp_path / "model")
    tensors = tiny_tensors(CONFIG)
    if change == "missing":
        del tensors["model.layers.1.mlp.up_proj.weight"]
    else:
        tensors["model.layers.1.mlp.up_proj.weight_scale_inv"] = np.ones(1, dtype=np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ModelFileError, match=change):
        load_model(folder, dtype=torch.float32, device=torch.device("cpu"))


def test_what_costs_more_to_read_than_to_compute_is_neither_kept_nor_read() -> None:
    tier = SlotTier()
    never = replace(ALWAYS_PAYS, tier_bytes={"disk": 0.1})
    here = bench(tier, costs=never)
    here.run(ask("writer", range(14), breakpoints=(write(14),)))
    assert tier.num_saves == 0

    here = bench(tier)
    here.run(ask("writer", range(14), breakpoints=(write(14),)))
    here.step()
    here.store = lambda runner: slot_store(runner, tier, costs=never)
    here.boot()
    record = record_of(here.run(ask("reader", range(20), read_tokens=14)))

    assert (record.reads_by_tier, tier.num_loads) == ({}, 0)
    assert here.core.stats()["leases_live"] == 1


def test_only_what_asks_to_persist_goes_to_a_tier_that_does_not_keep_all() -> None:
    disk, host = SlotTier(), SlotTier("host", keeps_all=True)
    here = bench(host, disk)

    here.run(ask("short", range(14), breakpoints=(write(14, persist=False),)))
    here.run(ask("long", range(100, 114), breakpoints=(write(14),)))

    assert (host.num_saves, disk.num_saves) == (2, 1)


def test_a_lease_that_begins_to_persist_is_copied_from_the_tier_that_has_it() -> None:
    host, disk = SlotTier("host", keeps_all=True), SlotTier()
    here = bench(host, disk)
    here.run(ask("short", range(14), breakpoints=(write(14, persist=False),)))
    here.step()
    next(here.core.leases.unpin_spare(), None)
    crowd(here)

    here.run(ask("long", range(20), read_tokens=14, breakpoints=(read(14, 3_600_000),)))
    here.step()
    here.store = lambda runner: slot_store(runner, disk)
    here.boot()
    record = record_of(here.run(ask("reader", range(20), read_tokens=14)))

    assert record.reads_by_tier == {"disk": 14}


def test_a_lease_in_a_slow_tier_is_not_read_for_a_copy_in_a_faster_one() -> None:
    host, disk = SlotTier("host", keeps_all=True), SlotTier()
    here = bench(disk)
    here.run(ask("writer", range(14), breakpoints=(write(14),)))
    here.step()
    here.store = lambda runner: slot_store(runner, host, disk)
    here.boot()

    here.run(ask("reader", range(20), read_tokens=14, breakpoints=(read(14),)))

    assert (disk.num_loads, host.num_saves) == (1, 0)


def test_a_lease_whose_copy_turns_out_damaged_at_its_refresh_is_leased_anew() -> None:
    host, disk = SlotTier("host", keeps_all=True), SlotTier()
    here = bench(host, disk)
    first = record_of(here.run(ask("short", range(14), breakpoints=(write(14, persist=False),))))
    here.step()
    next(here.core.leases.unpin_spare(), None)
    host.load = lambda key: None  # its blocks are still in the pool

    second = record_of(here.run(ask("long", range(14), read_tokens=14, breakpoints=(write(14),))))
    here.step()

    (old,), (new,) = first.grants, second.grants
    assert (new.outcome, second.tokens_reused_promised) == ("granted", 13)
    assert new.lease_id != old.lease_id
    assert [report.reason for report in here.core.take_reports()] == ["refreshed", "lost"]
    assert disk.whole == {kept[0].key for kept in disk.kept.values()} != set()
    assert here.core.stats()["leases_live"] == 1


def test_a_full_tier_gives_way_to_the_lease_that_lives_longest() -> None:
    tier = SlotTier(budget_bytes=4)
    here = bench(tier)
    here.run(ask("short", range(14), breakpoints=(write(14, 10_000),)))
    here.step()
    here.run(ask("long", range(100, 114), breakpoints=(write(14, 60_000),)))
    here.step()
    here.run(ask("shorter", range(200, 214), breakpoints=(write(14, 5_000),)))
    here.step()

    assert [kept[0].request_id for kept in tier.kept.values()] == ["long"]
    assert here.core.stats()["leases_live"] == 3
    assert here.core.stats()["lease_saves_skipped_total"] == 1


def test_a_pin_is_not_given_up_for_a_request_that_would_not_fit_even_so() -> None:
    tier = SlotTier()
    here = bench(tier, num_blocks=24, pin_cap_blocks=4)
    here.run(ask("writer", range(14), breakpoints=(write(14),)))
    here.step()
    here.submit(ask("running", range(500, 540), max_tokens=20))
    here.step()
    here.submit(ask("large", range(600, 670), max_tokens=1))
    here.step()

    assert here.core.stats()["num_requests_waiting"] == 1
    assert here.core.stats()["lease_given_up_total"] == 0
    here.drain()
    assert here.core.stats()["leases_live"] == 1


def test_two_full_tiers_make_room_for_one_lease() -> None:
    host, disk = SlotTier("host", keeps_all=True, budget_bytes=0), SlotTier(budget_bytes=4)
    here = bench(host, disk)
    here.run(ask("on disk", range(14), breakpoints=(write(14, 30_000),)))
    here.step()
    host.budget_bytes = 4
    here.run(ask("in host", range(100, 114), breakpoints=(write(14, 10_000, persist=False),)))
    here.step()

    here.run(ask("long", range(200, 214), breakpoints=(write(14, 60_000),)))
    here.step()

    kept = [[kept[0].request_id for kept in tier.kept.values()] for tier in (host, disk)]
    assert kept == [["long"], ["long"]]
    assert here.core.stats()["leases_live"] == 3


def test_a_lease_that_could_not_be_saved_is_saved_when_it_is_read_again() -> None:
    tier = SlotTier(budget_bytes=0)
    here = bench(tier)
    here.run(ask("writer", range(14), breakpoints=(write(14),)))
    assert tier.num_saves == 0
    tier.budget_bytes = 100

    here.run(ask("reader", range(20), read_tokens=14, breakpoints=(read(14),)))

    assert tier.num_saves == 1
