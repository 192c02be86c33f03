"""`kvcustody size ledger`: leaves, bytes and gigabytes per day of a workload's evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcustody.audit.evidence.query.evidence_size import EvidenceSize, evidence_size
from kvcustody.audit.store.database.engine import open_store
from kvcustody.console.command import Json, make_table, print_json, stdout
from kvcustody.console.opening import reading
from kvcustody.console.options import GivenLedger
from kvcustody.console.replay.command import replayed_aside
from kvcustody.errors import ConfigError
from kvcustody.lab.replay.run.workload_from_options import Choice

EPILOG = """
Examples:

    kvcustody size ledger

    kvcustody size ledger --ledger sqlite:///kvcustody.db --requests-per-second 200

    kvcustody size ledger conversation_trace.jsonl --limit 500 --json
"""
_DAY_SECONDS = 86_400
_POOL_BLOCKS = 8192


def evidence(
    trace: Annotated[
        Path | None, typer.Argument(help="A recorded trace, plain or gzip; none: a generated workload.")
    ] = None,
    *,
    ledger: GivenLedger = None,
    requests_per_second: Annotated[
        float, typer.Option(min=0.001, help="The request rate for the figures per day.")
    ] = 50.0,
    trace_format: Annotated[str | None, typer.Option(help="The trace's format, where it is not recognised.")] = None,
    policy: Annotated[str, typer.Option(help="A library policy or a YAML file.")] = "regulated-saas",
    tenants: Annotated[int, typer.Option(min=1, help="How many tenants share the requests.")] = 8,
    limit: Annotated[int, typer.Option(min=10, help="How many requests are replayed to measure.")] = 500,
    pool_blocks: Annotated[int, typer.Option(min=8, help="Blocks of the pool.")] = _POOL_BLOCKS,
    as_json: Json = False,
) -> None:
    """Size the evidence of a workload: leaves and bytes a request, and what a day of it takes.

    Measured, not estimated: the requests of a ledger that is there (--ledger), or of a workload or trace that is
    replayed into a temporary one. Bytes on disk are the database's own, rows, trees and indexes included.
    """
    if ledger is not None:
        if trace is not None:
            raise ConfigError("give a trace to replay or --ledger to measure, not both")
        with reading(ledger) as engine, engine.connect() as connection:
            size = evidence_size(connection)
    else:
        choice = Choice(trace, trace_format, tenants, 1, "session", None, limit)
        size = _of_replay(choice, policy, pool_blocks)
    if not size.requests:
        raise ConfigError("the ledger records no request: there is nothing to size", requests=0)
    document = as_document(size, requests_per_second)
    if as_json:
        print_json(document)
    else:
        _print(document)


def _of_replay(choice: Choice, policy: str, pool_blocks: int) -> EvidenceSize:
    with replayed_aside(choice, policy, pool_blocks) as (_, database):
        engine = open_store(database, read_only=True)
        try:
            with engine.connect() as connection:
                return evidence_size(connection)
        finally:
            engine.dispose()


def as_document(figures: EvidenceSize, requests_per_second: float) -> dict[str, Any]:
    """Return the figures as JSON values; bytes are of leaves unless their name says `disk`."""
    a_day = requests_per_second * _DAY_SECONDS / figures.requests
    return {
        "requests": figures.requests,
        "leaves": figures.leaves,
        "leaf_bytes": figures.leaf_bytes,
        "disk_bytes": figures.disk_bytes,
        "by_kind": {kind: {"leaves": leaves, "bytes": size} for kind, leaves, size in figures.kinds},
        "per_request": {
            "leaves": figures.leaves / figures.requests,
            "bytes": figures.leaf_bytes / figures.requests,
            "disk_bytes": figures.disk_bytes / figures.requests,
        },
        "requests_per_second": requests_per_second,
        "per_second": {"leaves": figures.leaves * a_day / _DAY_SECONDS},
        "per_day": {
            "leaves": figures.leaves * a_day,
            "gigabytes": figures.leaf_bytes * a_day / 1e9,
            "disk_gigabytes": figures.disk_bytes * a_day / 1e9,
        },
    }


def _print(document: dict[str, Any]) -> None:
    console = stdout()
    kinds = make_table(f"evidence of {document['requests']:,} requests", "kind", "leaves", "bytes")
    for kind, row in document["by_kind"].items():
        kinds.add_row(kind, f"{row['leaves']:,}", f"{row['bytes']:,}")
    console.print(kinds)
    each, day = document["per_request"], document["per_day"]
    console.print(
        f"a request: {each['leaves']:.2f} leaves, {each['bytes']:,.0f} bytes of leaves, "
        f"{each['disk_bytes']:,.0f} on disk with rows, trees and indexes"
    )
    console.print(
        f"at {document['requests_per_second']:g} requests/s: {document['per_second']['leaves']:,.1f} leaves/s; "
        f"a day takes {day['leaves']:,.0f} leaves, {day['gigabytes']:.2f} GB of leaves, "
        f"{day['disk_gigabytes']:.2f} GB on disk"
    )
