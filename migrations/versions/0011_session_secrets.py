"""A secret in a subject's row, from which its sessions' pseudonyms come.

Rows from before have none: their sessions keep rows of their own, and so do new sessions of theirs.
"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("subjects", sa.Column("secret", sa.Text(), nullable=True))
