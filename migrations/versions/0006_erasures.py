"""Erasures in every process: what each took, what stays, what was read back, and who says that it is done.

Results get the incarnation that gave them, and requests the parts of their selector that name no person; both are in
the leaves already and are read from there.
"""

from typing import Any

import orjson
import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("erasure_results", sa.Column("incarnation", sa.Integer(), nullable=True))
    op.execute(
        "UPDATE erasure_results SET incarnation = COALESCE((SELECT incarnation FROM events WHERE "
        "events.log = erasure_results.log AND events.idx = erasure_results.idx), 0)"
    )
    with op.batch_alter_table("erasure_results") as batch:
        batch.alter_column("incarnation", existing_type=sa.Integer(), nullable=False)
    op.add_column("erasures", sa.Column("detail", sa.Text(), nullable=True))
    _fill_details(op.get_bind())
    with op.batch_alter_table("erasures") as batch:
        batch.alter_column("detail", existing_type=sa.Text(), nullable=False)
    numbers = ("requests", "finishing", "residencies", "blocks", "low", "high")
    _table("erasure_effects", sa.Column("part", sa.Integer(), nullable=False), *map(_number, numbers))
    _table(
        "erasure_remains",
        sa.Column("part", sa.Integer(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        *map(_number, ("blocks", "low", "high")),
    )
    _table("erasure_rereads", *map(_number, ("checked", "changed", "nonzero")))


def _fill_details(connection: sa.Connection) -> None:
    found = sa.text(
        "SELECT erasures.log, erasures.idx, events.leaf FROM erasures JOIN events "
        "ON events.log = erasures.log AND events.idx = erasures.idx"
    )
    rows = [
        {"log": row.log, "idx": row.idx, "detail": _detail(bytes(row.leaf))}
        for row in connection.execute(found)
    ]
    if rows:
        connection.execute(
            sa.text("UPDATE erasures SET detail = :detail WHERE log = :log AND idx = :idx"), rows
        )
    connection.execute(sa.text("UPDATE erasures SET detail = '' WHERE detail IS NULL"))


def _detail(leaf: bytes) -> str:
    try:
        return str(orjson.loads(leaf).get("detail", ""))
    except (orjson.JSONDecodeError, AttributeError):
        return ""  # not a leaf of ours: `audit fsck` names it


def _number(name: str) -> sa.Column[Any]:
    return sa.Column(name, sa.BigInteger(), nullable=False)


def _table(name: str, *columns: sa.Column[Any]) -> None:
    op.create_table(
        name,
        sa.Column("log", sa.Integer(), nullable=False),
        sa.Column("idx", sa.BigInteger(), nullable=False),
        sa.Column("incarnation", sa.Integer(), nullable=False),
        sa.Column("erasure", sa.Text(), nullable=False),
        *columns,
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("log", "idx", name=op.f(f"pk_{name}")),
    )
    op.create_index(f"ix_{name}_erasure", name, ["erasure"], unique=False)
