"""The source of a remade document for a reader with an export: the reader's own ledger, built from its leaves.

1. An export counts where `verify_export` found nothing wrong, it holds every log whole with the root log's openings,
   and its checkpoint is the document's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Connection, func, insert, select

from kvcustody.audit.evidence.processes.orders import refused_orders
from kvcustody.audit.exports.file_formats import leaves_of
from kvcustody.audit.exports.manifest import MANIFEST, ExportManifest, parse_manifest
from kvcustody.audit.reports.sections.boundary import Witnessed
from kvcustody.audit.store.database.engine import WRITE, open_store
from kvcustody.audit.store.database.signed_orders import RefusedOrder, SignedOrders
from kvcustody.audit.store.database.snapshot import as_of_sizes
from kvcustody.audit.store.schema.all_tables import every_table
from kvcustody.audit.store.schema.ledger import events, logs
from kvcustody.audit.store.schema.retention import cosignatures
from kvcustody.audit.store.schema.trees import checkpoints, root_leaves, signed_checkpoints
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.tlog.proofs import ProofError
from kvcustody.audit.tlog.tiles import CHECKPOINT
from kvcustody.audit.verify.verify_export import verify_export
from kvcustody.audit.write.rebuild import LogLeaves, rebuild_ledger
from kvcustody.errors import LedgerError


class SourceRejected(LedgerError):  # noqa: N818 - a verdict, as in the tree's `LedgerUnavailable`
    """The source given for a document cannot be used: it is damaged, partial, or of another checkpoint."""


def check_ledger(connection: Connection, checkpoint: int) -> None:
    """Raise `SourceRejected` if the ledger has no checkpoint of this size."""
    try:
        LedgerProofs(connection).sizes(checkpoint)
    except ProofError as problem:
        raise SourceRejected(f"the document is of checkpoint {checkpoint}: {problem.message}") from None


def orders_refused(
    connection: Connection, checkpoint: int, orders: SignedOrders | None, tenant: str | None = None
) -> tuple[RefusedOrder, ...] | None:
    """Return the orders under a checkpoint that do not count; None if the reader trusts no key. For one tenant, its
    own.
    """
    if orders is None:
        return None
    sizes = LedgerProofs(connection).sizes(checkpoint)
    return refused_orders(connection, orders, as_of_sizes(connection, sizes), tenant)


class SealedAs(NamedTuple):
    """The checkpoint that a document states, and its sealing facts; the export supplies missing ones."""

    size: int
    root: str = ""
    note: str = ""
    signed_us: int = 0
    witnessed: Witnessed = Witnessed((), 0, None, "")


@contextmanager
def ledger_of_export(folder: Path, seal: SealedAs, vkeys: Sequence[str]) -> Iterator[Connection]:
    """Yield the reader's own ledger, built from an export, as long as it is open; raises `SourceRejected` (rule 1)."""
    try:
        manifest = _whole(folder, seal, vkeys)
    except SourceRejected:
        raise
    except (LedgerError, OSError) as problem:
        text = problem.message if isinstance(problem, LedgerError) else problem
        raise SourceRejected(f"export `{folder}` cannot be read: {text}", path=folder) from None
    with tempfile.TemporaryDirectory(prefix="kvcustody-document-") as name:
        engine = open_store(Path(name) / "ledger.db")
        try:
            with engine.begin() as connection:
                every_table()[0].metadata.create_all(connection)
            note = seal.note or (folder / CHECKPOINT).read_text()
            _fill(engine, folder, manifest, seal._replace(note=note))
            with engine.connect() as connection:
                yield connection
        finally:
            engine.dispose()


def _whole(folder: Path, seal: SealedAs, vkeys: Sequence[str]) -> ExportManifest:
    verdict = verify_export(folder, vkeys)
    if not verdict.ok:
        raise SourceRejected(f"export `{folder}` is not sound: {verdict.problems[0]}", path=folder)
    manifest = parse_manifest((folder / MANIFEST).read_bytes())
    root = manifest.root.root.hex()
    if (manifest.root.size, root) != (seal.size, seal.root or root):
        raise SourceRejected(
            f"the export is of checkpoint {manifest.root.size}, the document of {seal.size}: "
            f"`kvcustody audit export --as-of {seal.size}` makes the one"
        )
    parts = [log.name for log in manifest.logs if (log.range.first, log.range.end) != (0, log.head.size)]
    if parts or not manifest.openings:
        raise SourceRejected(
            "the export only has parts of logs, or no root log, so no figure can be recomputed from it"
        )
    return manifest


def _fill(engine: Any, folder: Path, manifest: ExportManifest, seal: SealedAs) -> None:
    """Every log of the export, which is whole."""
    with engine.connect().execution_options(**WRITE) as connection, connection.begin():
        rebuild_ledger(
            connection,
            [
                LogLeaves(
                    log.name,
                    0,
                    log.head.size,
                    (leaf for file in log.files for leaf in leaves_of(manifest.form, folder / file.path)),
                )
                for log in sorted(manifest.logs, key=lambda log: log.name)
            ],
        )
        _seal(connection, manifest, seal)


def _seal(connection: Connection, manifest: ExportManifest, seal: SealedAs) -> None:
    """The checkpoint over these logs, as the export's verified heads have it."""
    last = connection.scalar(select(func.max(events.c.at_us))) or 0
    ids = {row.name: row.id for row in connection.execute(select(logs.c.id, logs.c.name))}
    heads = [
        {"idx": place, "log": ids[log.name], "size": log.head.size, "root": log.head.root, "salt": b""}
        for place, log in enumerate(manifest.logs)
        if log.head.size
    ]
    signed = insert(signed_checkpoints)
    connection.execute(insert(root_leaves), heads)
    connection.execute(insert(checkpoints).values(size=seal.size, root=manifest.root.root, at_us=last))
    signed_us = seal.signed_us or last
    connection.execute(signed.values(size=seal.size, note=seal.note.encode(), at_us=signed_us))
    names, size, age_us, _ = seal.witnessed
    if age_us is not None and 0 < size <= seal.size and 0 <= age_us <= signed_us:
        # before anything is made of it: statuses and limitations follow from it, and are compared
        same = {"size": size, "line": b"", "at_us": signed_us - age_us}
        connection.execute(insert(cosignatures), [{**same, "witness": name} for name in sorted({*names})])
