"""Leaves by month on PostgreSQL: `events` becomes a partitioned table, and what it holds one partition of it.

No leaf changes or moves, so no root does. Two indexes are built over what is there; SQLite stays as it is.
"""

import time

from alembic import op

from kvcustody.audit.partitions import make_partitioned

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    connection = op.get_bind()
    if connection.dialect.name == "postgresql":
        make_partitioned(connection, time.time_ns() // 1000)
