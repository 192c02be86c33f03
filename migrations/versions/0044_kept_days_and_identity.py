"""Store a case's days as its calendar gave them, and give a ledger an identity.

Cases that are there already keep none: their days are counted from zone and holidays, as before. No leaf changes.
"""

import secrets

import sqlalchemy as sa
from alembic import op

revision = "0044"
down_revision = "0043"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("cases", sa.Column("ends", sa.Text(), nullable=True))
    op.add_column("root_log", sa.Column("identity", sa.Text(), nullable=True))
    root_log = sa.table("root_log", sa.column("identity"))
    op.execute(root_log.update().values(identity=secrets.token_hex(8)))
