from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.gateway.front import Front, assert_error, front


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
        assert await missing(gateway) == []

        gateway.engine.weights_digest = "others"
        assert await missing(gateway) == ["engine"]

        gateway.engine.lost = True
        assert await missing(gateway) == ["engine"]


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
    assert numbers["num_requests_running"] == 2
    assert numbers["prefix_tokens_lease_read_total"] == 7
    assert numbers["kvmeter_requests_total"] == 1
    assert without.status_code == 200
    assert "num_requests_running" not in samples(without.text)
