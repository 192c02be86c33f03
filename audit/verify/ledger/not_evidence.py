"""Database columns of the ledger that no leaf proves, with why nothing depends on them.

1. Whatever is not in this list is re-derived: an edit of it is a problem that `fsck` names. A test edits every column
   of every table of the schema and deletes rows of each: one that is neither found nor listed fails it.
2. `ROWS` in place of a column: that rows are missing is not found.
"""

from __future__ import annotations

from typing import NamedTuple

ROWS = "(rows)"
_COPY = "the control plane's own state (`schema.service`, rule 1): lost or edited, it changes no verdict; "


class NotEvidence(NamedTuple):
    """Columns of one table, or its rows (`ROWS`), and why nothing depends on them."""

    table: str
    columns: tuple[str, ...]
    why: str


NOT_EVIDENCE = (
    NotEvidence(
        "incarnations",
        ("started_us", "worker", ROWS),
        "of processes that announced no memory (commands, the control plane) while they run: they hold nothing, owe "
        "nothing, and no page counts them as workers; `fsck` says how many there are",
    ),
    NotEvidence("tenants", ("first_seen_us",), "nobody reads it; the first leaf of a tenant's log has the time"),
    NotEvidence(
        "subject_unlinkings",
        ("id", "count", ROWS),
        "tells running writers to read names anew; what was unlinked is in `subject-unlinked` leaves",
    ),
    NotEvidence(
        "subjects",
        ("secret",),
        "of rows whose secret is sealed under a subject's key (control planes with subject keys), and of names made "
        "before they were committed to: asking for the name compares it, and `fsck` says how many there are",
    ),
    NotEvidence(
        "tree_nodes",
        (ROWS,),
        "of a half level as a whole: a ledger from before half levels has none, and a proof only costs more without",
    ),
    NotEvidence(
        "checkpoints",
        (ROWS,),
        "that no signature names, where it and the next have logs in the order of their names: the next "
        "checkpoint covers both",
    ),
    NotEvidence(
        "root_log",
        ("identity",),
        "a random text that tells events of this ledger from those of another; keys and leaves do not rest on it",
    ),
    NotEvidence(
        "unsealed_heads",
        ("grown_us", ROWS),
        "when a commit was, for the age of what is not sealed; a row less is found where it is the last of its log, "
        "and else the next row covers its leaves",
    ),
    NotEvidence(
        "counter_deltas",
        ("size",),
        "the name of a delta until it is folded; it counts by its other columns, whose sums are re-derived",
    ),
    NotEvidence(
        "sequence_spans",
        ("first_sequence", "last_sequence", ROWS),
        "a range less, or a shorter one, says less: what is there is looked at again; a longer one is found, but for "
        "processes that ended in a ledger that was purged: of those it is what is left, beside the export",
    ),
    NotEvidence(
        "coverage_pass",
        ("at_us",),
        "when coverage was judged last, by the clock of who judged: the verdicts are re-derived as of that moment",
    ),
    NotEvidence(
        "signed_checkpoints",
        ("at_us",),
        "the signer's own clock; timestamps and lines of witnesses are times that others state",
    ),
    NotEvidence(
        "signed_checkpoints",
        (ROWS,),
        "a note less says less, never something false: later notes cover it, and the newest is in the signer's memory, "
        "with witnesses, and with whoever kept it (`fsck --note`)",
    ),
    NotEvidence(
        "cosignatures",
        (ROWS,),
        "evidence from outside: what a witness signed, it has too; without a line reports claim less",
    ),
    NotEvidence(
        "timestamps",
        ("size", "authority", "token", "at_us", ROWS),
        "evidence from outside: whoever reads an export checks a token by its authority's certificate; `fsck` says how "
        "many there are",
    ),
    *(
        NotEvidence(
            table,
            ("*", ROWS),
            "how far an upgrade is that copies rows: the copy is compared with the leaves before it counts",
        )
        for table in ("schema_changes", "schema_change_logs")
    ),
    NotEvidence("service_principals", ("kind", "version"), "how a page shows somebody, and the edition of the row"),
    NotEvidence(
        "service_principals",
        ("enrolled_us", "disabled_us"),
        "the moment is in the leaf; whether somebody is disabled is re-derived",
    ),
    NotEvidence(
        "service_principals",
        ("given",),
        "stops one bootstrap key from giving two roles; who let whom in is in `principal-changed` leaves",
    ),
    NotEvidence(
        "service_keys",
        ("hash", "issued_us", "expires_us", "used_us", "revoked_us"),
        "who may ask next, not what was: what a key did is on record under its principal; whose it is, what it is "
        "bound to and whether it was revoked is re-derived",
    ),
    NotEvidence("service_sessions", ("*", ROWS), _COPY + "ends sign-ins or lets one go on"),
    NotEvidence("service_answers", ("*", ROWS), _COPY + "answers kept for callers who repeat a request"),
    NotEvidence("service_jobs", ("*", ROWS), _COPY + "what a job made is an answer to one caller, made anew at will"),
    NotEvidence(
        "service_workers",
        ("*", ROWS),
        _COPY + "what workers said of themselves last, shown as that; who is at work is in leaves",
    ),
    NotEvidence(
        "erase_epochs",
        ("*", ROWS),
        "what doors and workers name routers' namespaces by; which erasure raised what is in `epoch-raised` leaves, "
        "and what a door follows in `epochs-taken` leaves. A row less brings names back, under which routers may know "
        "what an erasure ended: engines have nothing of it",
    ),
    NotEvidence(
        "service_epoch_takers",
        ("*", ROWS),
        _COPY + "which version workers and doors asked with last; what a door follows is in `epochs-taken` leaves",
    ),
    NotEvidence(
        "service_scan_orders",
        ("*", ROWS),
        _COPY + "who asked for a scan is in an `access` leaf, what a scan found in `orphan-scanned` leaves",
    ),
    NotEvidence(
        "service_report_schedules",
        ("*", ROWS),
        _COPY + "who made, paused or deleted a schedule is in `report-schedule-changed` leaves",
    ),
    NotEvidence(
        "service_reports",
        ("*", ROWS),
        _COPY + "what a schedule made, its digest and its opinion are in `scheduled-report-made` leaves",
    ),
    NotEvidence(
        "service_report_deliveries",
        ("*", ROWS),
        _COPY + "what was handed over, and what was not taken, is in `report-delivery` leaves",
    ),
)


def not_evidence_table() -> str:
    """Return the list as a table for docs/."""
    rows = ["| table | columns | why nothing rests on it |", "|---|---|---|"]
    for entry in NOT_EVIDENCE:
        columns = ", ".join(
            "every column" if name == "*" else "that rows are there" if name == ROWS else f"`{name}`"
            for name in entry.columns
        )
        rows.append(f"| `{entry.table}` | {columns} | {entry.why} |")
    return "\n".join(rows) + "\n"
