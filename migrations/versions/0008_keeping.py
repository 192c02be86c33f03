"""What witnesses and timestamp authorities signed; purges of ledger content, and legal holds. They begin empty."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def _big(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=False)


def _text(name: str, *, null: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), nullable=null)


def _place() -> tuple[sa.Column[int], sa.Column[int]]:
    return sa.Column("log", sa.Integer(), nullable=False), _big("idx")


def upgrade() -> None:
    for name, by, evidence in (("cosignatures", "witness", "line"), ("timestamps", "authority", "token")):
        op.create_table(
            name,
            _big("size"),
            _text(by),
            sa.Column(evidence, sa.LargeBinary(), nullable=False),
            _big("at_us"),
            sa.PrimaryKeyConstraint("size", by, name=op.f(f"pk_{name}")),
        )
    op.create_table(
        "retention_purges",
        *_place(),
        _text("of_log"),
        *map(_big, ("first", "below", "size")),
        *map(_text, ("digest", "actor", "approver", "reason")),
        _big("at_us"),
        sa.PrimaryKeyConstraint("log", "idx", name=op.f("pk_retention_purges")),
    )
    op.create_table(
        "legal_holds",
        *_place(),
        _text("hold"),
        _text("tenant", null=True),
        *map(_text, ("action", "reason", "actor")),
        _big("at_us"),
        sa.PrimaryKeyConstraint("log", "idx", name=op.f("pk_legal_holds")),
    )
