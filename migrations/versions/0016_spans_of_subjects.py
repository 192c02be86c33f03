"""The index of residencies by subject has spans of 1,024 leaves of a log before the subject.

By tenant and subject alone, each opening changed a page of the index somewhere in it: the larger a ledger, the more of
them were to be read, logged and written for each batch. Rows stay as they are.
"""

from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_index("ix_residencies_tenant_subject", "residencies")
    op.execute("CREATE INDEX ix_residencies_log_subject ON residencies (log, (idx / 1024), subject)")
