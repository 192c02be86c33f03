"""Database columns of the ledger that no leaf proves, with why nothing depends on them.

1. Whatever is not in this list is re-derived: an edit of it is a problem that `fsck` names. A test edits every column
   of every table of the schema and deletes rows of each: one that is neither found nor listed fails it.
2. `ROWS` in place of a column: that rows are missing is not found.
"""

from __future__ import annotations

from typing import NamedTuple

ROWS = "(rows)"
_COPY = "the control plane's own state (`schema.service`, rule 1): losing or editing it changes no verdict; "


class NotEvidence(NamedTuple):
    """Columns of one table, or its rows (`ROWS`), and why nothing depends on them."""

    table: str
    columns: tuple[str, ...]
    why: str


NOT_EVIDENCE = (
    NotEvidence(
        "incarnations",
        ("started_us", "worker", ROWS),
        "rows of running processes without announced memory (commands, the control plane): they hold nothing, owe "
        "nothing, and no page counts them as workers; `fsck` reports their number",
    ),
    NotEvidence("tenants", ("first_seen_us",), "unused; the first leaf of a tenant's log has the time"),
    NotEvidence(
        "subject_unlinkings",
        ("id", "count", ROWS),
        "makes running writers read names again; `subject-unlinked` leaves record what was unlinked",
    ),
    NotEvidence(
        "subjects",
        ("secret",),
        "secrets sealed under a subject's key (control planes with subject keys), and names from before "
        "commitments: asking for the name compares it, and `fsck` reports their number",
    ),
    NotEvidence(
        "tree_nodes",
        (ROWS,),
        "a whole half level: ledgers from before half levels have none, and proofs without it only cost more",
    ),
    NotEvidence(
        "checkpoints",
        (ROWS,),
        "rows without a signature, if their logs and the next row's are in name order: the next checkpoint covers both",
    ),
    NotEvidence(
        "root_log",
        ("identity",),
        "a random text that distinguishes this ledger's events from another's; keys and leaves do not depend on it",
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
        "a missing or shorter range claims less, and existing leaves are examined again; a longer range is found, "
        "except for processes that ended in a purged ledger, of which only it and the export remain",
    ),
    NotEvidence(
        "coverage_pass",
        ("at_us",),
        "when coverage was last judged, by the judge's clock: the verdicts are re-derived as of that moment",
    ),
    NotEvidence(
        "signed_checkpoints",
        ("at_us",),
        "the signer's own clock; timestamps and witnesses' lines have times that others state",
    ),
    NotEvidence(
        "signed_checkpoints",
        (ROWS,),
        "a missing note claims less, never something false: later notes cover it, and the signer, witnesses and "
        "anybody who kept it have the newest (`fsck --note`)",
    ),
    NotEvidence(
        "cosignatures",
        (ROWS,),
        "external evidence: a witness keeps what it signed; without a line reports claim less",
    ),
    NotEvidence(
        "timestamps",
        ("size", "authority", "token", "at_us", ROWS),
        "external evidence: an export's reader verifies a token by its authority's certificate; `fsck` reports "
        "their number",
    ),
    *(
        NotEvidence(
            table,
            ("*", ROWS),
            "the progress of an upgrade that copies rows: the copy is compared with the leaves before it counts",
        )
        for table in ("schema_changes", "schema_change_logs")
    ),
    NotEvidence("service_principals", ("kind", "version"), "how pages show a principal, and the version of the row"),
    NotEvidence(
        "service_principals",
        ("enrolled_us", "disabled_us"),
        "the leaf has the time; whether a principal is disabled is re-derived",
    ),
    NotEvidence(
        "service_principals",
        ("given",),
        "prevents one bootstrap key from granting two roles; `principal-changed` leaves record who enrolled whom",
    ),
    NotEvidence(
        "service_keys",
        ("hash", "issued_us", "expires_us", "used_us", "revoked_us"),
        "decides future access, not past acts: a key's acts are on record under its principal; its owner, its "
        "binding and its revocation are re-derived",
    ),
    NotEvidence("service_sessions", ("*", ROWS), _COPY + "ends sign-ins or lets one continue"),
    NotEvidence("service_answers", ("*", ROWS), _COPY + "answers kept for callers who repeat a request"),
    NotEvidence(
        "service_jobs", ("*", ROWS), _COPY + "a job's result is an answer to one caller, reproducible at any time"
    ),
    NotEvidence(
        "service_workers",
        ("*", ROWS),
        _COPY + "the workers' last own reports, shown as such; leaves record who is at work",
    ),
    NotEvidence(
        "erase_epochs",
        ("*", ROWS),
        "doors and workers derive routers' namespaces from it; `epoch-raised` leaves record which erasure raised an "
        "epoch, `epochs-taken` leaves which epochs a door follows. A missing row brings back names under which "
        "routers may know what an erasure ended; engines have nothing left of it",
    ),
    NotEvidence(
        "service_epoch_takers",
        ("*", ROWS),
        _COPY + "the version of workers' and doors' last requests; `epochs-taken` leaves record what a door follows",
    ),
    NotEvidence(
        "service_scan_orders",
        ("*", ROWS),
        _COPY + "an `access` leaf records who requested a scan, `orphan-scanned` leaves its findings",
    ),
    NotEvidence(
        "service_report_schedules",
        ("*", ROWS),
        _COPY + "`report-schedule-changed` leaves record who made, paused or deleted a schedule",
    ),
    NotEvidence(
        "service_reports",
        ("*", ROWS),
        _COPY + "`scheduled-report-made` leaves record each report, its digest and its opinion",
    ),
    NotEvidence(
        "service_report_deliveries",
        ("*", ROWS),
        _COPY + "`report-delivery` leaves record accepted and refused deliveries",
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
