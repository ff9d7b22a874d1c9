"""Epochs spent may be a fraction: a range test takes less than one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the tables to this step."""
    with op.batch_alter_table("hpo_registry") as table:
        table.alter_column("epochs_spent", existing_type=sa.Integer(), type_=sa.Double())


def downgrade() -> None:
    """Take the tables back to the step before."""
    with op.batch_alter_table("hpo_registry") as table:
        table.alter_column("epochs_spent", existing_type=sa.Double(), type_=sa.Integer())
