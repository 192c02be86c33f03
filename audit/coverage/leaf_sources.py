"""Where the leaves of a recount come from: the database, or an export in a folder.

1. Leaves are handed on as they were written, and nothing else is: no column and no manifest figure.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, select

from kvcustody.audit.database.dialect import dialect_of
from kvcustody.audit.database.snapshot import AsOf, is_in
from kvcustody.audit.exports.file_formats import leaves_of
from kvcustody.audit.exports.manifest import MANIFEST, parse_manifest
from kvcustody.audit.schema.all_tables import has_leaf
from kvcustody.audit.schema.ledger import events
from kvcustody.audit.tlog.tiles import ExportError


def leaves_in_database(connection: Connection, as_of: AsOf | None = None) -> Iterator[bytes]:
    """Every leaf of the ledger, or of a state of it; those of one log in their order."""
    query = select(events.c.leaf).where(is_in(as_of, events), has_leaf(events))
    if not dialect_of(connection).in_file:
        query = query.order_by(events.c.log, events.c.idx)
        return map(bytes, connection.execute(query, execution_options={"yield_per": 10_000}).scalars())
    # From the driver itself, which reads row by row: a row object for each of a million leaves costs more than they do.
    # And as the file has them, which is as they were written: in any other order pages are read many times over.
    text = str(query.compile(dialect=connection.dialect, compile_kwargs={"literal_binds": True}))
    driver: Any = connection.connection.driver_connection
    return chain.from_iterable(driver.execute(text))


def leaves_in_export(folder: Path) -> Iterator[bytes]:
    """Every leaf of an export that `kvcustody audit export` wrote; raises `ExportError` where it is none.

    Nothing is verified here: `kvcustody audit verify` does that, and comes first.
    """
    try:
        manifest = parse_manifest((folder / MANIFEST).read_bytes())
    except OSError as problem:
        raise ExportError(f"export `{folder}`: {problem.strerror}", path=folder) from problem
    for log in manifest.logs:
        for file in log.files:
            yield from leaves_of(manifest.form, folder / file.path)
