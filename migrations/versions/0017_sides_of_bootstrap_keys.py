"""A bootstrap principal keeps which of two roles that nobody holds together it has given somebody.

Of one from before it is what those whom it enrolled hold. One that has given both keeps both, and gives neither again.
"""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

_APART = ("author", "approver")


def upgrade() -> None:
    op.add_column("service_principals", sa.Column("given", sa.Text(), nullable=True))
    table = sa.table(
        "service_principals", *(sa.column(name) for name in ("name", "roles", "enrolled_by", "given"))
    )
    connection = op.get_bind()
    rows = connection.execute(sa.select(table.c.name, table.c.roles, table.c.enrolled_by)).all()
    boots = {row.name for row in rows if row.roles == "bootstrap"}
    given: dict[str, set[str]] = {}
    for row in rows:
        if row.enrolled_by in boots:
            given.setdefault(row.enrolled_by, set()).update(set(row.roles.split(",")) & set(_APART))
    for name, roles in given.items():
        if roles:
            changed = sa.update(table).where(table.c.name == name).values(given=",".join(sorted(roles)))
            connection.execute(changed)
