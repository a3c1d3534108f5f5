from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from billing.price_cards import PriceCard, publish
from tests.gateway.front import HEADERS, NOW_MS, Front, assert_error, front
from tests.gateway.stack import RATES


def samples(text: str) -> dict[str, float]:
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def missing(gateway: Front) -> list[str]:
    answer = await gateway.http.get("/readyz")
    if answer.status_code == 200:
        return []
    return [
        reason.partition(":")[0] for reason in assert_error(answer, 503, "api_error").split("; ")
    ]


async def test_healthz_needs_nothing(tmp_path: Path) -> None:
    async with front(tmp_path) as gateway:
        gateway.engine.lost = True

        assert (await gateway.http.get("/healthz")).status_code == 200


async def test_readyz_names_what_is_missing(tmp_path: Path) -> None:
    async with front(tmp_path) as gateway:
        assert await missing(gateway) == ["price"]
        assert str(tmp_path) not in (await gateway.http.get("/readyz")).text
        publish_card(gateway)
        assert await missing(gateway) == []

        gateway.engine.weights_digest = "others"
        assert await missing(gateway) == ["engine"]

        gateway.engine.lost = True
        assert await missing(gateway) == ["engine"]


async def test_a_model_without_a_price_is_neither_ready_nor_sold(tmp_path: Path) -> None:
    async with front(tmp_path) as gateway:
        not_ready = await gateway.http.get("/readyz")
        body = {"model": "wt", "max_tokens": 1, "messages": [{"role": "user", "content": "one"}]}
        refused = await gateway.http.post("/v1/messages", json=body, headers=HEADERS)

    assert "no price card is in force for the model: wt" in assert_error(
        not_ready, 503, "api_error"
    )
    assert "it has no price" in assert_error(refused, 400, "invalid_request_error")


def publish_card(gateway: Front) -> None:
    card = PriceCard("wt@1", "wt", 1, 0, RATES)
    gateway.deps.database.write_now(lambda conn: publish(conn, [card], NOW_MS))


async def test_readyz_wants_a_migrated_database(tmp_path: Path) -> None:
    async with front(tmp_path) as gateway:
        gateway.deps.database.write_now(
            lambda conn: conn.exec_driver_sql("UPDATE alembic_version SET version_num = 'old'")
        )

        assert "database" in await missing(gateway)


async def test_metrics_carry_the_engines_numbers_under_their_names(tmp_path: Path) -> None:
    async with front(tmp_path) as gateway:
        await gateway.http.get("/healthz")
        answer = await gateway.http.get("/metrics")

        gateway.engine.lost = True
        without = await gateway.http.get("/metrics")

    numbers = samples(answer.text)
    assert (numbers["kvmeter_open_holds"], numbers["kvmeter_oldest_open_hold_seconds"]) == (0, 0)
    assert numbers["num_requests_running"] == 2
    assert numbers["prefix_tokens_lease_read_total"] == 7
    assert numbers["kvmeter_requests_total"] == 1
    assert without.status_code == 200
    assert "num_requests_running" not in samples(without.text)
