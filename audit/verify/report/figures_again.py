"""A report made again from what its reader has: the ledger itself, or a verified export of the same checkpoint.

1. Of an export every figure is made from leaves: they are written into an empty ledger of the reader's own, and the
   report is built on that. What no leaf says (`NOT_IN_LEAVES`) is taken from the report, and is unchecked.
2. An export counts where `verify_export` found nothing wrong, it holds every log whole with the root log's openings,
   and its checkpoint is the report's.
3. What a report changed since an earlier checkpoint is made again too: the openings of the root log say how long every
   log was then.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from sqlalchemy import Connection, func, insert, select

from kvcustody.audit.evidence.coverage.custody_units import last_event_us
from kvcustody.audit.evidence.processes.orders import refused_orders
from kvcustody.audit.exports.file_formats import leaves_of
from kvcustody.audit.exports.manifest import MANIFEST, OPENINGS, ExportManifest, parse_manifest
from kvcustody.audit.leaf.merkle import EMPTY, Frontier, TreeHead, leaf_hashes
from kvcustody.audit.reports.build_report import build_report, changes_since
from kvcustody.audit.reports.framework import NAMES, Framework
from kvcustody.audit.reports.model import Report
from kvcustody.audit.reports.system_boundary import Witnessed
from kvcustody.audit.store.database.engine import WRITE, open_store
from kvcustody.audit.store.database.signed_orders import RefusedOrder, SignedOrders
from kvcustody.audit.store.database.snapshot import as_of_sizes
from kvcustody.audit.store.schema.all_tables import every_table
from kvcustody.audit.store.schema.ledger import events, logs
from kvcustody.audit.store.schema.retention import cosignatures
from kvcustody.audit.store.schema.trees import checkpoints, root_leaves, signed_checkpoints
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.tlog.proofs import ProofError, check_consistency
from kvcustody.audit.tlog.root_log import RootLeafOpening
from kvcustody.audit.tlog.tiles import CHECKPOINT
from kvcustody.audit.verify.verify_export import verify_export
from kvcustody.audit.write.rebuild import LogLeaves, rebuild_ledger
from kvcustody.errors import LedgerError

_AT_ONCE = 20_000
NO_PATH = "none that leads from the earlier checkpoint to this one"


class Unchecked(NamedTuple):
    """A part of a report that was not checked, by its path in the JSON, and why."""

    path: str
    why: str


class MadeAgain(NamedTuple):
    """A report that was made again, from what, and which of its parts were taken from the report itself.

    `refused`: orders that do not count, by the keys that its reader trusts; None: the reader named none.
    """

    report: Report
    source: str
    unchecked: tuple[Unchecked, ...]
    refused: tuple[RefusedOrder, ...] | None = None


NOT_IN_LEAVES = (
    Unchecked("boundary.witnessed", "which witnesses had signed is in no leaf"),
    Unchecked("boundary.checkpoint.at_us", "when leaves were sealed is in no leaf"),
    Unchecked("boundary.checkpoint.signed_us", "when the checkpoint was signed is in no leaf"),
    Unchecked("window", "when leaves were signed is in no leaf"),
)
SAID_BY_PEOPLE = (
    Unchecked("responses", "what people answered to exceptions is in no leaf"),
    Unchecked("asked.preparer", "who prepared it is in no leaf: the signature says whose key signed"),
    Unchecked("asked.threshold_ppm", "which share its reader asked for is in no leaf"),
)
OWN_FRAMEWORK = (
    Unchecked("framework", "it is of the preparer's own file: whether its controls are what they say"),
    Unchecked("asked.framework", "it is of the preparer's own file"),
    Unchecked("statements", "they name controls of the preparer's own file"),
)
EARLIER_EDITION = Unchecked(
    "changes",
    "what was so at the earlier checkpoint: the export has not what opens each leaf of its root log",
)
PROOF = Unchecked("proof", "the policy was not given: prove it again with `--policy`")


def again_from_ledger(
    connection: Connection, stated: Report, orders: SignedOrders | None = None
) -> MadeAgain:
    """The report again, from the ledger that it is of; raises as `build_report`. `orders`: whose orders count in it."""
    made = build_report(
        connection, stated.asked, proof=stated.proof, responses=stated.responses, framework=_own(stated)
    )
    refused = orders_refused(connection, stated.asked.checkpoint, orders, stated.asked.tenant)
    return MadeAgain(made, "the ledger", _of_proof(stated), refused)


def again_from_export(
    folder: Path, stated: Report, vkeys: Sequence[str], orders: SignedOrders | None = None
) -> MadeAgain:
    """The report again, from an export's leaves; raises `LedgerError` for an export that does not count (rule 2).

    `orders`: whose orders count in the ledger that it is of.
    """
    point = stated.boundary.checkpoint
    seal = SealedAs(point.size, point.root, point.note, point.signed_us, stated.boundary.witnessed)
    with ledger_of_export(folder, seal, vkeys) as connection:
        made = build_report(
            connection,
            stated.asked._replace(extends=None),
            proof=stated.proof,
            is_proved=False,
            responses=stated.responses,
            framework=_own(stated),
        )
        earlier = None if stated.asked.extends is None else _earlier_state(folder, stated.asked.extends)
        if earlier is not None and earlier.sizes is not None:
            state = as_of_sizes(connection, earlier.sizes)
            changes = changes_since(connection, made, state, last_event_us(connection, state))
            made = made._replace(changes=changes)
        refused = orders_refused(connection, stated.asked.checkpoint, orders, stated.asked.tenant)
    path = () if earlier is None else _extension(earlier, stated)
    unchecked = (*NOT_IN_LEAVES, *_of_proof(stated))
    if earlier is not None and earlier.sizes is None:
        made, unchecked = made._replace(changes=stated.changes), (*unchecked, EARLIER_EDITION)
    return MadeAgain(_with_seal(made, stated, path), "the export", unchecked, refused)


def orders_refused(
    connection: Connection, checkpoint: int, orders: SignedOrders | None, tenant: str | None = None
) -> tuple[RefusedOrder, ...] | None:
    """The orders under a checkpoint that do not count; None where the reader trusts no key. Of one tenant, its own."""
    if orders is None:
        return None
    sizes = LedgerProofs(connection).sizes(checkpoint)
    return refused_orders(connection, orders, as_of_sizes(connection, sizes), tenant)


class SealedAs(NamedTuple):
    """The checkpoint that a document says it is of; what else of it the document has, else the export says it."""

    size: int
    root: str = ""
    note: str = ""
    signed_us: int = 0
    witnessed: Witnessed = Witnessed((), 0, None, "")


@contextmanager
def ledger_of_export(folder: Path, seal: SealedAs, vkeys: Sequence[str]) -> Iterator[Connection]:
    """A ledger of the reader's own, for as long as it is open; raises as `again_from_export`."""
    manifest = _whole(folder, seal, vkeys)
    with tempfile.TemporaryDirectory(prefix="kvcustody-report-") as name:
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


def _of_proof(stated: Report) -> tuple[Unchecked, ...]:
    made = () if stated.proof is None else (PROOF, Unchecked("rerun", "it names the policy's file"))
    return (*SAID_BY_PEOPLE, *made, *(() if _own(stated) is None else OWN_FRAMEWORK))


def _own(stated: Report) -> Framework | None:
    """A framework that is not of the library comes from the report itself."""
    return None if stated.asked.framework in NAMES else stated.framework


def _whole(folder: Path, seal: SealedAs, vkeys: Sequence[str]) -> ExportManifest:
    verdict = verify_export(folder, vkeys)
    if not verdict.ok:
        raise LedgerError(f"export `{folder}` is not sound: {verdict.problems[0]}", path=folder)
    manifest = parse_manifest((folder / MANIFEST).read_bytes())
    root = manifest.root.root.hex()
    if (manifest.root.size, root) != (seal.size, seal.root or root):
        raise LedgerError(
            f"the export is of checkpoint {manifest.root.size}, the report of {seal.size}: "
            f"`kvcustody audit export --as-of {seal.size}` makes the one"
        )
    parts = [log.name for log in manifest.logs if (log.range.first, log.range.end) != (0, log.head.size)]
    if parts or not manifest.openings:
        raise LedgerError(
            "the export holds parts of logs only, or no root log, so that no figure can be made again from it"
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


class _EarlierState(NamedTuple):
    """The beginning of the root log; `sizes` of every log, None where what opens a leaf of it was destroyed."""

    frontier: Frontier
    sizes: dict[str, int] | None


def _earlier_state(folder: Path, size: int) -> _EarlierState:
    """The first leaves of the root log that an export has, which was verified; fewer where it has no more."""
    frontier, sizes, is_open = EMPTY, dict[str, int](), True
    with (folder / OPENINGS).open("rb") as file:
        lines = islice(map(orjson.loads, file), max(0, size))
        while some := list(islice(lines, _AT_ONCE)):
            frontier = frontier.extend(leaf_hashes([bytes.fromhex(line["leaf"]) for line in some])).frontier
            openings = [line["opening"] for line in some]
            is_open = is_open and None not in openings
            for opening in openings if is_open else ():
                opened = RootLeafOpening.from_bytes(bytes.fromhex(opening))
                sizes[opened.name] = max(opened.head.size, sizes.get(opened.name, 0))
    return _EarlierState(frontier, sizes if is_open else None)


def _extension(earlier: _EarlierState, stated: Report) -> tuple[str, ...]:
    """The path from the earlier checkpoint, where it leads from the root log's beginning to the signed root."""
    boundary = stated.boundary
    point = boundary.checkpoint
    try:
        if earlier.frontier.size != stated.asked.extends:
            raise ProofError(f"the root log has no `{stated.asked.extends}` leaves")
        path = [bytes.fromhex(node) for node in boundary.consistency]
        check_consistency(earlier.frontier.head(), TreeHead(point.size, bytes.fromhex(point.root)), path)
    except (ProofError, ValueError):
        return (NO_PATH,)
    return boundary.consistency


def _with_seal(made: Report, stated: Report, path: tuple[str, ...]) -> Report:
    """What no leaf says, from the report (rule 1)."""
    boundary, sealed = made.boundary, stated.boundary
    point = boundary.checkpoint._replace(at_us=sealed.checkpoint.at_us)
    return made._replace(
        asked=stated.asked,
        window=stated.window,
        boundary=boundary._replace(
            checkpoint=point,
            witnessed=sealed.witnessed,
            extends=stated.asked.extends,
            consistency=path,
        ),
    )
