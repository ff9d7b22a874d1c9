"""The history of our own tables, for alembic."""
