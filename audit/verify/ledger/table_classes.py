"""The class of every table for `fsck`: what its rows should be."""

from __future__ import annotations

from enum import Enum
from functools import cache

from sqlalchemy import Table

from kvcustody.audit.store.schema import service
from kvcustody.audit.store.schema.all_tables import every_table, projections


class TableClass(Enum):
    """The origin of a table's rows, and so the way of checking them."""

    LEAF = "a row is a function of one leaf: it is made again and compared, window by window"
    FOLD = "a row follows from leaves in the order of their log: it is followed again from the first leaf on"
    SUM = "rows add up what leaves say: the sums are compared with those of the leaves that are left"
    AS_OF = "rows are verdicts of a stated state of the ledger: that state is judged again"
    TREE = "hashes over leaves and over hashes: they are computed again from the leaves, up to what was signed"
    APART = "no leaf gives the rows: each has the check that its own signature, names or range allow, or none"


_CLASSES = {
    TableClass.FOLD: (*("incarnations", "workers", "tenants", "policy_release", "service_principals", "service_keys"),),
    TableClass.SUM: ("counters", "counter_deltas"),
    TableClass.AS_OF: ("coverage_hours", "coverage_pass"),
    TableClass.TREE: (*("events", "logs", "tree_nodes", "root_leaves", "root_log", "checkpoints", "unsealed_heads"),),
    TableClass.APART: (
        *(
            "sequence_spans",
            "subjects",
            "subject_unlinkings",
            "signed_checkpoints",
            "cosignatures",
            "timestamps",
            "schema_changes",
            "schema_change_logs",
        ),
    ),
}


@cache
def table_classes() -> dict[Table, TableClass]:
    """Return the class of every table; raises `KeyError` if one has none, or two."""
    stated: dict[str, TableClass] = {}
    for table in projections():
        stated[table.name] = TableClass.LEAF
    for of, names in _CLASSES.items():
        for name in names:
            if name in stated:
                raise KeyError(f"`{name}` has two classes")
            stated[name] = of
    for table in every_table():
        if hasattr(service, table.name):
            stated.setdefault(table.name, TableClass.APART)
    return {table: stated[table.name] for table in every_table()}


def table_classes_table() -> str:
    """Return the classes with their tables, for the page on the ledger."""
    lines = ["| class | tables |", "|---|---|"]
    for of in TableClass:
        names = sorted(table.name for table, its in table_classes().items() if its is of)
        lines.append(f"| {of.value} | {', '.join(f'`{name}`' for name in names)} |")
    return "\n".join(lines) + "\n"
