"""Alembic's environment script: migrates the connection that `billing.schema` passes in.

A developer's `alembic revision --autogenerate` names its database with `-x url=…` instead.
"""

from alembic import context
from sqlalchemy import Connection

from billing.columns import metadata
from billing.database import database_url, writing_engine


def main() -> None:
    """Run the migrations on the given connection, inside its transaction."""
    conn = context.config.attributes.get("connection")
    if conn is not None:
        migrate(conn)
        return
    url = context.get_x_argument(as_dictionary=True)["url"]
    with writing_engine(database_url(url)).begin() as own:
        migrate(own)


def migrate(conn: Connection) -> None:
    """Run Alembic's migrations; tables are never copied (no batch mode)."""
    context.configure(connection=conn, target_metadata=metadata, render_as_batch=False)
    with context.begin_transaction():
        context.run_migrations()


main()
