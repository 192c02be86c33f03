"""The audit explorer's leaves as a file: all that match its filters, in its order.

1. Lines hold the canonical bytes of each leaf. The table has readable columns beside them; a text that a spreadsheet
   would take for a formula is written behind an apostrophe.
2. It is read page by page, each in a snapshot of its own: memory is bounded, and no reader is held up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import orjson
from starlette.responses import Response, StreamingResponse

from kvcustody.audit.evidence.explore.by_time import find_by_time
from kvcustody.audit.evidence.processes.marked_processes import history
from kvcustody.audit.evidence.query.events import Cursor, EventFilter, EventRow
from kvcustody.audit.exports.csv_table import csv_text
from kvcustody.console.render.event_sentences import sentence_of
from kvcustody.console.render.number_format import moment
from kvcustody.console.web.page_request import PageRequest
from kvcustody.console.web.pages.audit import asked_of, is_newest
from kvcustody.governance.api.http.gate import HISTORY
from kvcustody.governance.api.operations.audit import EventQuery
from kvcustody.governance.service.access.roles import Permission
from kvcustody.governance.service.problem_details import not_found

_ROWS = 1_000
_COLUMNS = ("time", "log", "idx", "kind", "what happened", "leaf")
_TYPES = {"csv": "text/csv; charset=utf-8", "ndjson": "application/x-ndjson"}


def export(visit: PageRequest) -> Response:
    """Return the file; `fleet.exports` decides whose leaves may leave a tenant's log, as for an export."""
    form = visit.places["form"]
    if form not in _TYPES:
        raise not_found()
    tenant, asked = asked_of(visit)
    mine = visit.service.tenant_of(visit.caller, Permission.READ_CUSTODY, tenant)
    wanted, newest = EventQuery(**asked).filter(mine), is_newest(visit)
    visit.record("consoleAuditExport", tenant)
    visit.service.export(visit.caller)
    encode = {"csv": _csv, "ndjson": _ndjson}[form]
    headers = {"Content-Disposition": f'attachment; filename="audit.{form}"'}
    marked = visit.service.marked()
    if marked:
        headers[HISTORY.decode()] = history(marked)
    parts = _parts(visit, mine, wanted, newest, encode)
    return StreamingResponse(parts, media_type=_TYPES[form], headers=headers)


def _parts(
    visit: PageRequest,
    mine: str | None,
    wanted: EventFilter,
    newest: bool,
    encode: Callable[[tuple[EventRow, ...], bool], bytes],
) -> Iterator[bytes]:
    after: Cursor | None = None
    first = True
    while True:
        with visit.service.reading(mine) as connection:
            found = find_by_time(connection, wanted, newest=newest, after=after, limit=_ROWS)
        yield encode(found.rows, first)
        if found.next is None or visit.service.stopping.is_set():
            return
        after, first = found.next, False


def _ndjson(rows: tuple[EventRow, ...], first: bool) -> bytes:
    return b"".join(b'{"log":%b,"idx":%d,"leaf":%b}\n' % (orjson.dumps(row.log), row.idx, row.leaf) for row in rows)


def _csv(rows: tuple[EventRow, ...], first: bool) -> bytes:
    head = (_COLUMNS,) if first else ()
    cells = ((moment(row.at_us), row.log, row.idx, row.kind, sentence_of(row.body), row.leaf.decode()) for row in rows)
    return csv_text((*head, *cells)).encode()
