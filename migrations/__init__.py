"""The schema's migrations: Alembic revisions, the same for SQLite and PostgreSQL."""
