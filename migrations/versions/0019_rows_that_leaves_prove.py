"""A process that announced its memory began when it said so, as its leaf has it.

A leaf that retention dropped was of a tenant's log: starts are in the system log, whose leaves stay.
"""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    events = sa.table("events", *(sa.column(name) for name in ("log", "idx", "incarnation", "kind", "at_us")))
    lives = sa.table("incarnations", sa.column("id"), sa.column("started_us"))
    connection = op.get_bind()
    query = sa.select(events.c.incarnation, events.c.at_us).where(events.c.kind == "worker-started")
    for life, at_us in connection.execute(query.order_by(events.c.log, events.c.idx)).all():
        connection.execute(sa.update(lives).where(lives.c.id == life).values(started_us=at_us))
