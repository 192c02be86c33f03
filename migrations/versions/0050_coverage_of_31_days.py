"""Keep coverage by hour for 31 days, with the times from due to overwritten. The next pass of the judge fills it."""

import sqlalchemy as sa
from alembic import op

revision = "0050"
down_revision = "0049"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("DELETE FROM coverage_hours")
    op.execute("DELETE FROM coverage_pass")
    op.add_column("coverage_hours", sa.Column("lags", sa.Text, nullable=False, server_default=sa.text("''")))
