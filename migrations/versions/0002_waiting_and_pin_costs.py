"""The wait deadline of pending cache entries, and lease reports.

Revision 0002, after 0001. Spelled out in SQL and frozen, like 0001.
"""

from alembic import op

from migrations.immutable import make_immutable

revision = "0002"
down_revision = "0001"

# NULL for entries that were pending before: no request waits for them.
AWAITED = "ALTER TABLE cache_entries ADD COLUMN awaited_until_ms BIGINT"

LEASE_REPORTS = """
    CREATE TABLE lease_reports (
        lease_id TEXT NOT NULL,
        idle_block_ms BIGINT NOT NULL,
        contended_block_ms BIGINT NOT NULL,
        reason TEXT NOT NULL,
        request_id TEXT NOT NULL,
        entry_key TEXT,
        tokens BIGINT NOT NULL,
        tier TEXT NOT NULL,
        num_bytes BIGINT NOT NULL,
        reported_at_ms BIGINT NOT NULL,
        CONSTRAINT pk_lease_reports PRIMARY KEY (lease_id, idle_block_ms, contended_block_ms,
            reason),
        CONSTRAINT ck_lease_reports_reason CHECK (reason IN ('refreshed', 'expired', 'unpinned',
            'lost', 'dropped', 'stopped')),
        CONSTRAINT ck_lease_reports_not_negative CHECK (idle_block_ms >= 0 AND
            contended_block_ms >= 0 AND tokens >= 0 AND num_bytes >= 0),
        CONSTRAINT fk_lease_reports_request_id FOREIGN KEY(request_id) REFERENCES holds
            (request_id)
    )
    """

INDEXES = (
    "CREATE INDEX ix_lease_reports_request_id ON lease_reports (request_id)",
    "CREATE INDEX ix_lease_reports_reported_at_ms ON lease_reports (reported_at_ms)",
)


def upgrade() -> None:
    """Add the column and the table, its indexes and its triggers."""
    sqlite = op.get_bind().dialect.name == "sqlite"
    if not sqlite:
        op.execute("SET LOCAL lock_timeout = '5s'")  # a long reader must not stop every writer
    op.execute(AWAITED.replace("BIGINT", "INTEGER") if sqlite else AWAITED)
    table = LEASE_REPORTS
    op.execute(table.replace("BIGINT", "INTEGER") + "STRICT" if sqlite else table)
    for index in INDEXES:
        op.execute(index)
    make_immutable(
        "lease_reports",
        unique_keys=(("lease_id", "idle_block_ms", "contended_block_ms", "reason"),),
    )
