"""Who is champion and challenger, with those before; and the source of a study's module."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

HELD = sa.text("until_at IS NULL")


def upgrade() -> None:
    """Bring the tables to this step."""
    op.create_table(
        "hpo_alias",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("study", sa.String(512), nullable=False),
        sa.Column("metric", sa.Text(), nullable=False),
        sa.Column("alias", sa.String(32), nullable=False),
        sa.Column("row_id", sa.String(36), nullable=False),
        sa.Column("why", sa.Text()),
        sa.Column("since_at", sa.DateTime(), nullable=False),
        sa.Column("until_at", sa.DateTime()),
    )
    op.create_index("ix_hpo_alias_study", "hpo_alias", ["study"])
    op.create_index("uq_hpo_alias_holder", "hpo_alias", ["study", "metric", "alias"], unique=True,
                    sqlite_where=HELD, postgresql_where=HELD)
    op.create_table(
        "hpo_source",
        sa.Column("digest", sa.String(64), primary_key=True),
        sa.Column("files", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
    )


def downgrade() -> None:
    """Take the tables back to the step before."""
    op.drop_table("hpo_source")
    op.drop_table("hpo_alias")
