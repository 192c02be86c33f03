"""Make a report from one reading of the ledger as of a checkpoint, which every section uses.

1. Every section is made in a fixed order from sorted facts, so that SQLite and PostgreSQL give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

from sqlalchemy import Connection

from kvcustody._version import __version__
from kvcustody.audit.evidence.coverage.custody_units import CustodySelection
from kvcustody.audit.evidence.coverage.recount_process import open_recount
from kvcustody.audit.reports.framework import Framework, load_framework
from kvcustody.audit.reports.given import PolicyProof, Response
from kvcustody.audit.reports.leaf_counts import first_leaf_us, newest_leaf_us
from kvcustody.audit.reports.model import Report
from kvcustody.audit.reports.parameters import ReportParameters
from kvcustody.audit.reports.section import ReportReading, sections
from kvcustody.audit.store.database.snapshot import as_of_sizes
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.errors import ConfigError

Progress = Callable[[str], None]


def newest_checkpoint(connection: Connection) -> int:
    """Return the newest signed checkpoint; raises `ProofError` if none is signed."""
    return LedgerProofs(connection).signed().size


def period(connection: Connection, checkpoint: int, since_us: int | None, until_us: int | None) -> tuple[int, int]:
    """Return a period's bounds: by default from the first to the last leaf under the checkpoint, rounded outwards to
    seconds.
    """
    state = as_of_sizes(connection, LedgerProofs(connection).sizes(checkpoint))
    if since_us is None:
        since_us = first_leaf_us(connection, state) // 1_000_000 * 1_000_000
    if until_us is None:
        until_us = (newest_leaf_us(connection, checkpoint) // 1_000_000 + 1) * 1_000_000
    if since_us >= until_us:
        raise ConfigError("the period is empty: its start must be before its end", since_us=since_us)
    return since_us, until_us


def build_report(
    connection: Connection,
    asked: ReportParameters,
    *,
    proof: PolicyProof | None = None,
    progress: Progress | None = None,
    is_proved: bool = True,
    responses: Sequence[Response] = (),
    framework: Framework | None = None,
) -> Report:
    """Return the requested report; `is_proved`: its sampled leaves come with inclusion proofs.

    `framework` is one that is not of the library, whose id is asked for. `progress` is told the title of each section.

    Raises `ConfigError` for an unknown framework, `ProofError` where the checkpoint is not signed.
    """
    state = as_of_sizes(connection, LedgerProofs(connection).sizes(asked.checkpoint))
    framework = framework or load_framework(asked.framework)
    now_us = newest_leaf_us(connection, asked.checkpoint)
    chosen = CustodySelection(asked.since_us, asked.until_us, asked.tenant)
    beside = open_recount(connection, chosen, now_us, state) if asked.recount else nullcontext()
    with beside as recount:
        reading = ReportReading(
            connection,
            asked,
            framework,
            state=state,
            now_us=now_us,
            proof=proof,
            responses=tuple(responses),
            recount=recount,
            is_proved=is_proved,
            progress=progress,
        )
        facts = {
            name: value
            for section in sorted(sections(), key=lambda each: each.stage)
            for name, value in section.to_fields(reading[section]).items()
        }
    return Report(__version__, asked, framework, facts)
