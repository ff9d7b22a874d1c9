"""What alembic runs: our tables only, on a connection that the caller gives.

Without the filter, autogenerate would write a DROP TABLE for each of Optuna's tables.
"""

from __future__ import annotations

from alembic import context

from storage import schema

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=schema.metadata,
    version_table=schema.VERSION_TABLE,
    include_name=schema.is_ours,
    render_as_batch=True,
    # Also on SQLite, which can: nobody sees a database that is half set up.
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
