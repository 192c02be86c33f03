"""The first revision: the schema of commit f6818e1f, where every ledger that this program reads begins.

It has nothing to do. A new ledger is made by `create_schema` and stamped with the newest revision, and a
ledger of that commit is stamped `0041` already. What that schema was, to the letter, is recorded in
`tests/lib/standins/migrations/recorded`: the next revision is tested against it.
"""

revision = "0041"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    pass
