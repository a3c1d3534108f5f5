"""Namespaces take turns: what one of them queues does not decide how long another one waits."""

from engine.protocol import Admitted, Finished, Rejected, Tokens
from tests.engine.oracle import Bench, ask, small_config


def bench(**changes: object) -> Bench:
    sizes = {"num_blocks": 200, "pin_cap_blocks": 0, "max_num_batched_tokens": 16}
    return Bench(small_config(**(sizes | changes)))


def flood(here: Bench, namespace: bytes, num_requests: int, *, prompt_tokens: int = 70) -> None:
    for number in range(num_requests):
        name = f"{namespace.decode()} {number}"
        prompt = [number] * prompt_tokens
        assert here.submit(ask(name, prompt, max_tokens=4, namespace=namespace)) is None


def steps_to_first_token(here: Bench, request_id: str) -> int:
    for num_steps in range(1, 500):
        if any(isinstance(e, Tokens) and e.request_id == request_id for e in here.step()):
            return num_steps
    raise AssertionError(f"starved: {request_id}")


def test_fifty_long_prompts_delay_another_tenants_short_one_by_at_most_a_turn() -> None:
    for num_steps_before in range(30):
        here = bench()
        flood(here, b"large", 50)
        for _ in range(num_steps_before):
            here.step()

        here.submit(ask("short", [7] * 10, namespace=b"small"))

        # At most a turn of the other one, which may overshoot by a chunk, then its own.
        assert steps_to_first_token(here, "short") <= 3


def test_the_wait_grows_with_the_number_of_tenants_not_with_what_they_queue() -> None:
    here = bench()
    tenants = [b"a", b"b", b"c", b"d"]
    for tenant in tenants:
        flood(here, tenant, 20)
    for _ in range(9):
        here.step()

    here.submit(ask("short", [7] * 10, namespace=b"small"))

    assert steps_to_first_token(here, "short") <= 2 * len(tenants)


def test_tenants_with_endless_prompts_get_equal_parts_of_the_budget() -> None:
    here = bench(max_num_seqs=30)
    flood(here, b"many", 40, prompt_tokens=30)
    flood(here, b"few", 12, prompt_tokens=78)

    for _ in range(50):
        here.step()

    computed = {b"many": 0, b"few": 0}
    for plan in here.runner.plans:
        for row in plan.rows:
            if row.output_index == 0:
                computed[row.namespace] += len(row.token_ids)
    assert abs(computed[b"many"] - computed[b"few"]) <= 3 * 16
    here.drain()


def test_within_a_tenant_the_first_come_is_the_first_served() -> None:
    here = bench()
    flood(here, b"a", 12)
    flood(here, b"b", 12)

    admitted = [e.request_id for e in here.drain() if isinstance(e, Admitted)]

    for tenant in "ab":
        own = [name for name in admitted if name.startswith(tenant)]
        assert own == [f"{tenant} {number}" for number in range(12)]


def test_a_head_that_does_not_fit_is_not_starved_by_smaller_ones() -> None:
    here = bench(num_blocks=24, max_num_batched_tokens=64)
    flood(here, b"small", 30, prompt_tokens=9)
    here.step()
    here.submit(ask("large", range(100, 176), namespace=b"large"))
    flood(here, b"other", 30, prompt_tokens=9)

    # Those who run end within a few steps, and nobody takes what they leave.
    assert steps_to_first_token(here, "large") <= 12
    here.drain()


def test_unchunked_prompts_take_turns_too() -> None:
    here = bench(enable_chunked_prefill=False)
    flood(here, b"large", 20)
    here.step()
    here.submit(ask("short", [7] * 10, namespace=b"small"))

    assert steps_to_first_token(here, "short") <= 3
    here.drain()


def steps_until_admitted(here: Bench, request_id: str, *, max_steps: int = 500) -> int:
    for num_steps in range(1, max_steps):
        if any(isinstance(e, Admitted) and e.request_id == request_id for e in here.step()):
            return num_steps
    raise AssertionError(f"starved: {request_id}")


def test_a_request_that_does_not_fit_beside_its_own_tenants_keeps_no_other_out() -> None:
    here = bench(num_blocks=64, max_model_len=240, max_num_batched_tokens=64, max_bypass_ms=10)
    here.submit(ask("long", range(80), max_tokens=160, namespace=b"large"))
    here.step()
    here.submit(ask("does not fit", range(300, 520), namespace=b"large"))

    for number in range(100):
        name = f"small {number}"
        here.submit(ask(name, [number] * 9, max_tokens=2, namespace=b"small"))
        assert steps_until_admitted(here, name) == 1


def test_two_tenants_together_close_admission_for_at_most_half_of_the_time() -> None:
    here = bench(num_blocks=64, max_model_len=240, max_num_batched_tokens=64, max_bypass_ms=10)
    here.submit(ask("long", range(40), max_tokens=200, namespace=b"one"))
    here.step()
    here.submit(ask("does not fit", range(300, 520), namespace=b"two"))

    waits = []
    for number in range(100):
        name = f"small {number}"
        here.submit(ask(name, [number] * 9, max_tokens=1, namespace=b"small"))
        waits.append(steps_until_admitted(here, name))

    assert max(waits) <= 11
    assert 1 < sum(waits) / len(waits) < 2.5
    assert here.core.state_of("does not fit") == "waiting"


def test_a_request_that_does_not_fit_starts_once_those_that_run_have_ended() -> None:
    here = bench(num_blocks=24, max_num_seqs=20, max_num_batched_tokens=64, max_bypass_ms=20)
    for number in range(200):
        request = ask(
            f"small {number}", [number] * 9, max_tokens=2 + number % 4, namespace=b"small"
        )
        here.submit(request)
    for _ in range(8):  # from now on they do not end together
        here.step()
    here.submit(ask("large", range(100, 176), namespace=b"large"))

    # They pass it for 20 steps, and none of them lasts longer than 5.
    assert 20 < steps_until_admitted(here, "large") <= 27


def test_borrowed_slots_are_given_back_to_a_tenant_that_has_none() -> None:
    here = bench(max_num_seqs=8, max_num_batched_tokens=64)
    for number in range(12):
        here.submit(ask(f"long {number}", [number], max_tokens=70, namespace=b"greedy"))
    here.step()
    assert here.core.stats()["num_requests_running"] == 8

    for number in range(6):
        here.submit(ask(f"short {number}", [number], max_tokens=40, namespace=b"modest"))
    for _ in range(8):
        here.step()

    running = [sequence.request.namespace for sequence in here.core.scheduler.running]
    assert running.count(b"greedy") == running.count(b"modest") == 4
    assert here.core.stats()["displacements_total"] == 4
    ends = {e.request_id: e.record for e in here.drain() if isinstance(e, Finished)}
    assert [ends[f"long {number}"].num_preemptions for number in range(8)] == [0] * 4 + [1] * 4
    assert all(record.finish_reason == "max_tokens" for record in ends.values())


def test_a_tenant_alone_has_every_slot() -> None:
    here = bench(max_num_seqs=8, max_num_batched_tokens=64)
    for number in range(12):
        here.submit(ask(f"long {number}", [number], max_tokens=70, namespace=b"greedy"))

    here.step()

    assert here.core.stats()["num_requests_running"] == 8
    here.drain()
    assert here.core.stats()["displacements_total"] == 0


def test_a_slot_that_becomes_free_goes_to_the_tenant_below_its_share() -> None:
    here = bench(max_num_seqs=2, max_num_batched_tokens=64)
    for number in range(9):
        here.submit(ask(f"greedy {number}", [number], max_tokens=5, namespace=b"greedy"))
        here.submit(ask(f"modest {number}", [number], max_tokens=5, namespace=b"modest"))

    while here.core.stats()["num_requests_waiting"] > 2:
        here.step()
        running = [sequence.request.namespace for sequence in here.core.scheduler.running]
        assert len(set(running)) == len(running)
    assert here.core.stats()["displacements_total"] == 0
    here.drain()


def test_in_a_full_queue_the_tenant_with_most_requests_makes_room() -> None:
    here = bench(max_queue=8)
    for number in range(8):
        here.submit(ask(f"greedy {number}", [number], namespace=b"greedy"))
    refused = here.submit(ask("greedy too many", [1], namespace=b"greedy"))
    assert refused is not None
    assert refused.code == "overloaded"

    for number in range(4):
        assert here.submit(ask(f"modest {number}", [number], namespace=b"modest")) is None
    assert here.submit(ask("modest too many", [1], namespace=b"modest")) is not None

    pushed_out = [e.request_id for e in here.step() if isinstance(e, Rejected)]
    assert pushed_out == [f"greedy {number}" for number in (7, 6, 5, 4)]
    here.drain()


def test_a_request_that_was_ended_and_pushed_out_at_once_ends_once() -> None:
    here = bench(max_queue=2)
    for number in range(2):
        here.submit(ask(f"greedy {number}", [number], namespace=b"greedy"))
    here.core.abort("greedy 1")

    here.submit(ask("modest", [1], namespace=b"modest"))

    ends = [e for e in here.drain() if e.request_id == "greedy 1"]
    assert [type(e) for e in ends] == [Rejected]
