"""Namespaces take turns: what one of them queues does not decide how long another one waits."""

from engine.protocol import Admitted, Tokens
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
