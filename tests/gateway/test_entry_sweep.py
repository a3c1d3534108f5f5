"""The sweep: expired entries go in pieces, each in a transaction of its own."""

from pathlib import Path

from sqlalchemy import event, func, select

from billing.entries import SWEEP_GRACE_MS
from billing.meters import WritePoint
from billing.tables import cache_entries
from gateway.background.entry_sweep import sweep_all
from tests.billing.books import TTL_MS, make_books
from tests.gateway.front import NOW_MS, front

EXPIRED_MS = NOW_MS - TTL_MS["5m"] - SWEEP_GRACE_MS


async def test_a_sweep_takes_a_transaction_a_piece_and_leaves_what_is_alive(tmp_path: Path) -> None:
    async with front(tmp_path) as gateway:
        books = make_books(gateway.deps.database, name="org_books")
        for number in range(5):
            write = WritePoint(8, "5m", f"key-{number}")
            books.settle(books.open(writes=(write,), started_at_ms=EXPIRED_MS))
        books.settle(books.open(writes=(WritePoint(8, "5m", "key-live"),), started_at_ms=NOW_MS))
        commits: list[object] = []
        engine = gateway.deps.database.write_now(lambda conn: conn.engine)
        event.listen(engine, "commit", commits.append)

        await sweep_all(gateway.deps, num_max=2)

        count = select(func.count()).select_from(cache_entries)
        assert gateway.deps.database.read_now(lambda conn: conn.scalar(count)) == 1
        assert len(commits) == 3
