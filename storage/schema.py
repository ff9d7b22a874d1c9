"""Our own tables, beside Optuna's in the same database.

No foreign key leads to Optuna's tables: one without a cascade makes Optuna's delete_study do
nothing, silently, and one with a cascade would delete the registry.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    Column,
    Double,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)

from storage.columns import Json, UtcDateTime

PREFIX = "hpo_"
VERSION_TABLE = "hpo_alembic_version"
# The newest file in migrations/versions; a test holds the two together.
REVISION = "0004"

metadata = MetaData()

studies = Table(
    "hpo_study",
    metadata,
    Column("name", String(512), primary_key=True),
    Column("module", Text),
    Column("metric", Text),
    Column("direction", Text),
    Column("epochs", Integer),
    Column("settings", Json),
    Column("space", Json),
    Column("created_at", UtcDateTime, nullable=False),
    Column("data", Json),
)

tickets = Table(
    "hpo_ticket",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", String(512), nullable=False),
    Column("study", String(512), nullable=False),
    Column("idx", Integer, nullable=False),
    Column("kind", String(16), nullable=False),
    Column("params", Json),
    Column("params_key", Text),
    Column("payload", Json),
    Column("state", String(16), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("owner", Text),
    Column("host", Text),
    Column("pid", Integer),
    Column("lease_until", Double),
    Column("claim_token", Text),
    Column("cause", Text),
    Column("trial_id", Integer),
    Column("trial_number", Integer),
    Column("result", Json),
    Column("created_at", UtcDateTime, nullable=False),
    Column("taken_at", UtcDateTime),
    Column("ended_at", UtcDateTime),
    UniqueConstraint("study", "idx", name="uq_hpo_ticket_study_idx"),
    UniqueConstraint("study", "params_key", name="uq_hpo_ticket_study_params_key"),
    # The queue itself: of thousands of tickets few wait and fewer run.
    Index(
        "ix_hpo_ticket_waiting",
        "name",
        "id",
        sqlite_where=text("state = 'waiting'"),
        postgresql_where=text("state = 'waiting'"),
    ),
    Index(
        "ix_hpo_ticket_running",
        "name",
        "id",
        sqlite_where=text("state = 'running'"),
        postgresql_where=text("state = 'running'"),
    ),
)

epochs = Table(
    "hpo_epoch",
    metadata,
    Column("study", String(512), primary_key=True),
    Column("trial_number", Integer, primary_key=True, autoincrement=False),
    Column("epoch", Integer, primary_key=True, autoincrement=False),
    Column("metrics", Json, nullable=False),
    Column("at", UtcDateTime, nullable=False),
)

registry = Table(
    "hpo_registry",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("study", String(512), nullable=False, index=True),
    Column("phase", String(32), nullable=False),
    Column("rank", Integer, nullable=False),
    Column("state", String(16), nullable=False),
    Column("trial", Integer),
    Column("params", Json),
    Column("metric", Text),
    Column("val_mean", Double),
    Column("val_sd", Double),
    Column("test_mean", Double),
    Column("test_sd", Double),
    Column("seeds", Json),
    Column("scores", Json),
    Column("epochs_spent", Double),
    Column("checkpoint", Text),
    Column("versions", Json),
    Column("git_commit", Text),
    Column("data_fingerprint", Text),
    Column("device", Text),
    Column("duration_s", Double),
    Column("data", Json),
    Column("created_at", UtcDateTime, nullable=False),
    # One row a place on the podium, for as long as the study lives.
    Index(
        "uq_hpo_registry_place",
        "study",
        "phase",
        "rank",
        unique=True,
        sqlite_where=text("state = 'current'"),
        postgresql_where=text("state = 'current'"),
    ),
)

aliases = Table(
    "hpo_alias",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("study", String(512), nullable=False, index=True),
    Column("metric", Text, nullable=False),
    Column("alias", String(32), nullable=False),
    Column("row_id", String(36), nullable=False),
    Column("why", Text),
    Column("since_at", UtcDateTime, nullable=False),
    Column("until_at", UtcDateTime),
    # One holder at a time; those before it are the history.
    Index(
        "uq_hpo_alias_holder",
        "study",
        "metric",
        "alias",
        unique=True,
        sqlite_where=text("until_at IS NULL"),
        postgresql_where=text("until_at IS NULL"),
    ),
)

sources = Table(
    "hpo_source",
    metadata,
    Column("digest", String(64), primary_key=True),
    Column("files", Json, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
)

workers = Table(
    "hpo_worker",
    metadata,
    Column("owner", String(64), primary_key=True),
    Column("name", String(512), nullable=False, index=True),
    Column("host", Text, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("device", Text),
    Column("started_at", UtcDateTime, nullable=False),
    Column("seen_s", Double, nullable=False),
    Column("data", Json),
)

marks = Table(
    "hpo_mark",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("value", Integer, nullable=False),
)


def is_ours(name: str | None, kind: str, _parents: Any) -> bool:
    """Say whether alembic may look at a table: only at those with our prefix."""
    return kind != "table" or str(name).startswith(PREFIX)
