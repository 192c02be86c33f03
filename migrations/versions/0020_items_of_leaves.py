"""A leaf may hold several releases, ends and receipts of one tenant: the rows of each are told apart by their item.

A row from before is of a leaf of its own, which is item 0. No leaf, tree or signature is touched.
"""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

_TABLES = ("releases", "custody_ends", "receipts")


def upgrade() -> None:
    for table in _TABLES:
        if op.get_bind().dialect.name != "sqlite":
            op.add_column(table, sa.Column("item", sa.Integer(), nullable=False, server_default="0"))
            op.drop_constraint(f"pk_{table}", table, type_="primary")
            op.create_primary_key(f"pk_{table}", table, ["log", "idx", "item"])
            continue
        with op.batch_alter_table(table, recreate="always") as batch:
            batch.add_column(sa.Column("item", sa.Integer(), nullable=False, server_default="0"))
            batch.drop_constraint(f"pk_{table}", type_="primary")
            batch.create_primary_key(f"pk_{table}", ["log", "idx", "item"])
