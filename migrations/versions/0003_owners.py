"""Gateways own their holds; one server secret a database.

Revision 0003, after 0002. Spelled out in SQL and frozen, like 0001.
"""

from alembic import op

from migrations.immutable import make_immutable

revision = "0003"
down_revision = "0002"

GATEWAYS = """
    CREATE TABLE gateways (
        boot_id TEXT NOT NULL,
        instance_id TEXT NOT NULL,
        engine_id TEXT NOT NULL,
        started_at_ms BIGINT NOT NULL,
        beats BIGINT NOT NULL,
        ended_at_ms BIGINT,
        ended_by TEXT,
        CONSTRAINT pk_gateways PRIMARY KEY (boot_id),
        CONSTRAINT ck_gateways_not_negative CHECK (beats >= 0),
        CONSTRAINT ck_gateways_ended CHECK ((ended_at_ms IS NULL) = (ended_by IS NULL))
    )
    """

SINGLE_ROW_TABLE = """
    CREATE TABLE server_secret (
        id BIGINT NOT NULL,
        secret_hex TEXT NOT NULL,
        CONSTRAINT pk_server_secret PRIMARY KEY (id),
        CONSTRAINT ck_server_secret_one CHECK (id = 1)
    )
    """

# NULL for holds that were opened before: their engine is the only one there was.
ENGINE_ID = "ALTER TABLE holds ADD COLUMN engine_id TEXT"

# Few gateways run at a time; their number grows with every start.
RUNNING = """
    CREATE INDEX ix_gateways_started_at_ms ON gateways (started_at_ms) WHERE ended_at_ms IS NULL
    """


def upgrade() -> None:
    """Add the two tables, and the engine of a hold."""
    sqlite = op.get_bind().dialect.name == "sqlite"
    if not sqlite:
        op.execute("SET LOCAL lock_timeout = '5s'")  # a long reader must not stop every writer
    for table in (GATEWAYS, SINGLE_ROW_TABLE):
        op.execute(table.replace("BIGINT", "INTEGER") + "STRICT" if sqlite else table)
    op.execute(ENGINE_ID)
    op.execute(RUNNING)
    make_immutable("server_secret", unique_keys=(("id",),))
