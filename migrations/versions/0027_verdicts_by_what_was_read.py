"""Verdicts by hour are judged anew: what a sampled receipt did not read counts as not read back.

They are a function of the leaves, and none is changed: the next pass judges every hour again.
"""

from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("DELETE FROM coverage_hours")
    op.execute("DELETE FROM coverage_pass")
