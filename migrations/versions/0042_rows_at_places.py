"""Refuse rows of evidence that no leaf can have given: CHECKs on keys, foreign keys to logs.

Rows that are there already stay, whatever they are: a row that breaks a rule is a finding of `kvcustody audit fsck`,
and no reader believes it. On PostgreSQL a rule that some row breaks stays `NOT VALID`: it holds for every row to come.

On SQLite the rules are added to the text of the tables, as SQLite's own page on ALTER TABLE describes for constraints.
No row is copied, so a large ledger takes no longer than a small one.
"""

from alembic import op
from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError

revision = "0042"
down_revision = "0041"
branch_labels = None
depends_on = None

_PROJECTIONS = (
    *("attachments", "case_steps", "cases", "copy_steps", "decisions", "erasure_effects", "erasure_remains"),
    *("erasure_rereads", "erasure_results", "erasures", "event_traces", "hit_counters", "legal_holds"),
    *("orphan_findings", "orphan_scans", "outages", "policy_revisions", "residencies", "retention_purges"),
    "transfer_decisions",
)
_OF_ITEMS = ("custody_ends", "receipts", "releases")
_LEAVES = ("events", *_PROJECTIONS, *_OF_ITEMS)
_MONTHLY = (
    *(
        "events",
        "residencies",
        "attachments",
        "releases",
        "custody_ends",
        "receipts",
        "decisions",
        "hit_counters",
    ),
    *("event_traces", "copy_steps", "transfer_decisions"),
)
_PLACES = {
    **dict.fromkeys(("events", *_PROJECTIONS), "log >= 0 AND idx >= 0"),
    **dict.fromkeys(_OF_ITEMS, "log >= 0 AND idx >= 0 AND item >= 0"),
    "tree_nodes": "log >= 0 AND idx >= 0",
    "root_leaves": "idx >= 0",
    **dict.fromkeys(("counter_deltas", "counters", "coverage_hours", "unsealed_heads"), "log >= 0"),
    **dict.fromkeys(("coverage_pass", "root_log", "subject_unlinkings"), "id = 1"),
}
_NUMBERS = {
    **dict.fromkeys(("events", *_PROJECTIONS), ("log", "idx")),
    **dict.fromkeys(_OF_ITEMS, ("log", "idx", "item")),
    **dict.fromkeys(("checkpoints", "cosignatures", "signed_checkpoints", "timestamps"), ("size",)),
    "counter_deltas": ("log", "size", "hour_us"),
    **dict.fromkeys(("counters", "coverage_hours"), ("hour_us", "log")),
    **dict.fromkeys(("coverage_pass", "root_log", "subject_unlinkings"), ("id",)),
    **dict.fromkeys(("incarnations", "logs", "workers"), ("id",)),
    "policy_release": ("number",),
    "root_leaves": ("idx",),
    "sequence_spans": ("incarnation", "first_sequence"),
    "tree_nodes": ("log", "level", "idx"),
    "unsealed_heads": ("log", "size"),
}


def upgrade() -> None:
    connection = op.get_bind()
    if connection.dialect.name == "sqlite":
        _on_sqlite(connection)
    else:
        _on_postgres(connection)


def _place(table: str) -> tuple[str, str]:
    return f"ck_{table}_place", f"CHECK ({_PLACES[table]})"


def _foreign(table: str) -> tuple[str, str]:
    return f"fk_{table}_log", "FOREIGN KEY(log) REFERENCES logs (id)"


def _on_sqlite(connection: Connection) -> None:
    run = connection.exec_driver_sql
    version = run("PRAGMA schema_version").scalar_one()
    run("PRAGMA writable_schema = ON")
    for table, numbers in _NUMBERS.items():
        rules = [_place(table)] if table in _PLACES else []
        said = " AND ".join(f"typeof({name}) = 'integer'" for name in numbers)
        rules.append((f"ck_{table}_numbers", f"CHECK ({said})"))
        rules += [_foreign(table)] if table in _LEAVES else []
        made = run("SELECT sql FROM sqlite_schema WHERE type = 'table' AND name = ?", (table,)).scalar_one()
        text = made.rstrip().removesuffix(")").rstrip()
        text += "".join(f", \n\tCONSTRAINT {name} {rule}" for name, rule in rules) + "\n)"
        run("UPDATE sqlite_schema SET sql = ? WHERE type = 'table' AND name = ?", (text, table))
    run(f"PRAGMA schema_version = {version + 1}")
    run("PRAGMA writable_schema = RESET")  # read anew, and written by nobody


def _on_postgres(connection: Connection) -> None:
    rules = [(table, *_place(table)) for table in _PLACES]
    rules += [(table, *_foreign(table)) for table in _LEAVES if table not in _MONTHLY]
    for table, name, rule in rules:
        op.execute(f"ALTER TABLE {table} ADD CONSTRAINT {name} {rule} NOT VALID")
    for table, name, _ in rules:
        try:
            with connection.begin_nested():
                op.execute(f"ALTER TABLE {table} VALIDATE CONSTRAINT {name}")
        except IntegrityError:  # a row breaks it: it stays, and is for `fsck` to name
            pass
