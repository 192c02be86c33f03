"""Leaves and trees are only ever inserted: triggers refuse the rest on both databases. No row changes."""

from alembic import op

from kvcustody.audit.append_only import protect

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    protect(op.get_bind())
