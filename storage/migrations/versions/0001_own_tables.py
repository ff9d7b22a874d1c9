"""Our own tables: studies, tickets, epochs, registry, workers, marks."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the tables to this step."""
    _create_studies()
    _create_tickets()
    _create_epochs()
    _create_registry()
    _create_workers()
    op.create_table(
        "hpo_mark",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("value", sa.Integer(), nullable=False),
    )


def downgrade() -> None:
    """Take the tables back to the step before."""
    for table in ("mark", "worker", "registry", "epoch", "ticket", "study"):
        op.drop_table(f"hpo_{table}")


def _create_studies() -> None:
    op.create_table(
        "hpo_study",
        sa.Column("name", sa.String(512), primary_key=True),
        sa.Column("module", sa.Text()),
        sa.Column("metric", sa.Text()),
        sa.Column("direction", sa.Text()),
        sa.Column("epochs", sa.Integer()),
        sa.Column("settings", sa.Text()),
        sa.Column("space", sa.Text()),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("data", sa.Text()),
    )


def _create_tickets() -> None:
    op.create_table(
        "hpo_ticket",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("name", sa.String(512), nullable=False),
        sa.Column("study", sa.String(512), nullable=False),
        sa.Column("idx", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("params", sa.Text()),
        sa.Column("params_key", sa.Text()),
        sa.Column("payload", sa.Text()),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("owner", sa.Text()),
        sa.Column("host", sa.Text()),
        sa.Column("pid", sa.Integer()),
        sa.Column("lease_until", sa.Double()),
        sa.Column("claim_token", sa.Text()),
        sa.Column("cause", sa.Text()),
        sa.Column("trial_id", sa.Integer()),
        sa.Column("trial_number", sa.Integer()),
        sa.Column("result", sa.Text()),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("taken_at", sa.DateTime()),
        sa.Column("ended_at", sa.DateTime()),
        sa.UniqueConstraint("study", "idx", name="uq_hpo_ticket_study_idx"),
        sa.UniqueConstraint("study", "params_key", name="uq_hpo_ticket_study_params_key"),
    )
    op.create_index("ix_hpo_ticket_queue", "hpo_ticket", ["name", "state", "id"])
    op.create_index("ix_hpo_ticket_state", "hpo_ticket", ["state"])


def _create_epochs() -> None:
    op.create_table(
        "hpo_epoch",
        sa.Column("study", sa.String(512), primary_key=True),
        sa.Column("trial_number", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("epoch", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("metrics", sa.Text(), nullable=False),
        sa.Column("at", sa.DateTime(), nullable=False),
    )


def _create_registry() -> None:
    op.create_table(
        "hpo_registry",
        sa.Column("id", sa.String(36), primary_key=True),
        sa.Column("study", sa.String(512), nullable=False),
        sa.Column("phase", sa.String(32), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("trial", sa.Integer()),
        sa.Column("params", sa.Text()),
        sa.Column("metric", sa.Text()),
        sa.Column("val_mean", sa.Double()),
        sa.Column("val_sd", sa.Double()),
        sa.Column("test_mean", sa.Double()),
        sa.Column("test_sd", sa.Double()),
        sa.Column("seeds", sa.Text()),
        sa.Column("scores", sa.Text()),
        sa.Column("epochs_spent", sa.Integer()),
        sa.Column("checkpoint", sa.Text()),
        sa.Column("versions", sa.Text()),
        sa.Column("git_commit", sa.Text()),
        sa.Column("data_fingerprint", sa.Text()),
        sa.Column("device", sa.Text()),
        sa.Column("duration_s", sa.Double()),
        sa.Column("data", sa.Text()),
        sa.Column("created_at", sa.DateTime(), nullable=False),
    )
    op.create_index("ix_hpo_registry_study", "hpo_registry", ["study"])
    current = sa.text("state = 'current'")
    op.create_index(
        "uq_hpo_registry_place",
        "hpo_registry",
        ["study", "phase", "rank"],
        unique=True,
        sqlite_where=current,
        postgresql_where=current,
    )


def _create_workers() -> None:
    op.create_table(
        "hpo_worker",
        sa.Column("owner", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(512), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("device", sa.Text()),
        sa.Column("started_at", sa.DateTime(), nullable=False),
        sa.Column("seen_s", sa.Double(), nullable=False),
        sa.Column("data", sa.Text()),
    )
    op.create_index("ix_hpo_worker_name", "hpo_worker", ["name"])
