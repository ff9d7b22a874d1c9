"""The queue's indices hold the waiting and the running tickets alone.

An index over all states is passed over by a planner that has statistics: nearly all tickets are
done, and a claim then walks over all of them.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

WAITING, RUNNING = sa.text("state = 'waiting'"), sa.text("state = 'running'")


def upgrade() -> None:
    """Bring the tables to this step."""
    op.drop_index("ix_hpo_ticket_queue", "hpo_ticket")
    op.drop_index("ix_hpo_ticket_state", "hpo_ticket")
    op.create_index("ix_hpo_ticket_waiting", "hpo_ticket", ["name", "id"],
                    sqlite_where=WAITING, postgresql_where=WAITING)
    op.create_index("ix_hpo_ticket_running", "hpo_ticket", ["name", "id"],
                    sqlite_where=RUNNING, postgresql_where=RUNNING)


def downgrade() -> None:
    """Take the tables back to the step before."""
    op.drop_index("ix_hpo_ticket_waiting", "hpo_ticket")
    op.drop_index("ix_hpo_ticket_running", "hpo_ticket")
    op.create_index("ix_hpo_ticket_queue", "hpo_ticket", ["name", "state", "id"])
    op.create_index("ix_hpo_ticket_state", "hpo_ticket", ["state"])
