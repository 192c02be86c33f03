"""How often subjects were unlinked: processes that have pseudonyms in memory see by it that some are nobody's any more.

It begins without a row, which is no unlinking yet. Where the roles are set up, writers may read it.
"""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

_WRITER = "SELECT 1 FROM pg_roles WHERE rolname = 'kvcustody_writer'"


def upgrade() -> None:
    op.create_table(
        "subject_unlinkings",
        sa.Column("id", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_subject_unlinkings")),
    )
    connection = op.get_bind()
    if connection.dialect.name == "postgresql" and connection.scalar(sa.text(_WRITER)):
        connection.exec_driver_sql("GRANT SELECT ON subject_unlinkings TO kvcustody_writer")
