"""The schema's history: Alembic revisions, the same for SQLite and PostgreSQL."""
