"""The audit explorer: leaves by their content, one leaf in full, and a button that checks its proof in the browser.

1. What is asked of the ledger is asked through the API's own function: the same filters of rows, the same cursors.
2. A log that is not the caller's is absent, the system log too.
3. How many events there are of each sort, and when, is the API's summary: read from figures where there are any, of the
   hours that the period touches. A live page shows the newest leaves alone, and is one read in five minutes.
4. `sentence_of` and `facts_of` put a leaf in words and leave nothing out: run lists appear by their count, and the
   canonical bytes stand beside these words.
5. The reader's own page views are one row of a page, at the place of the newest; a search by kind has each of them.
6. The chart of a short period has cells of seconds, where the summary has hours (`counters.fine_figures`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response

from kvcustody import times
from kvcustody.audit.evidence.counters.read_figures import hour_span
from kvcustody.audit.evidence.explore.summary import REFUSED
from kvcustody.audit.evidence.query.known_names import known_kind
from kvcustody.audit.kinds import SYSTEM, log_of, tenant_of
from kvcustody.audit.kinds.registry import HEAD_KEYS
from kvcustody.audit.leaf import LEAF_KEYS
from kvcustody.audit.leaf.change_items import CHANGED, plain_bodies
from kvcustody.audit.leaf.leaf_schema import DURATIONS
from kvcustody.audit.project import EVENTS
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.console.render.event_sentences import sentence_of
from kvcustody.console.render.number_format import count, duration, moment
from kvcustody.console.render.time_chart import Buckets, ChartSeries, TimeChart
from kvcustody.console.web.event_links import links_of, workers_of
from kvcustody.console.web.form_errors import FieldError
from kvcustody.console.web.page_request import PageRequest
from kvcustody.console.web.pages.overview import sees_all
from kvcustody.errors import ConfigError
from kvcustody.governance.api.operations import audit as audit_api
from kvcustody.governance.identity.w3c_trace import is_trace
from kvcustody.governance.keys.checkpoint_signing_key import recorded_keys
from kvcustody.governance.service.access.roles import Permission
from kvcustody.governance.service.operations.parameters import LARGE
from kvcustody.governance.service.problem_details import ProblemError, not_found
from kvcustody.times import HOUR_US, MINUTE_US

_PAGE = 50
_FEW = 20  # columns of a chart
PAGE_READ = "console"  # how the name of a page's read begins
_PRESETS_US = {
    "15m": 15 * MINUTE_US,
    "1h": HOUR_US,
    "4h": 4 * HOUR_US,
    "24h": 24 * HOUR_US,
    "7d": 7 * 24 * HOUR_US,
    "30d": 30 * 24 * HOUR_US,
}
_BOOT = "_boot_us"
_TEXTS = ("outcome", "actor", "rule", "grant", "incarnation", "block", "trace", "reader", "owner")
_NUMBERS = ("revision", "residency", "generation")


def explore(visit: PageRequest) -> Response:
    """Return a page of leaves that match the filters, with counts by kind and over time."""
    try:
        tenant, asked = asked_of(visit)
    except ConfigError as error:
        return _not_understood(visit, error.operands, error.message)
    except FieldError as error:
        return _not_understood(visit, error.wrong, error.detail)
    live = visit.text("live") is not None
    if live:
        visit.record_live("consoleAudit", tenant)
    else:
        visit.record("consoleAudit", tenant)
    answer = visit.ask(
        audit_api.found_events,
        tenant,
        **asked,
        order=audit_api.EventOrder.NEWEST if is_newest(visit) else audit_api.EventOrder.OLDEST,
        cursor=visit.text("cursor", 1024),
        limit=_PAGE,
    )
    page, workers = orjson.loads(answer.body), workers_of(visit)
    for item in page["items"]:
        item["summary"] = sentence_of(item["leaf"])
        item["links"] = links_of(visit, item["leaf"], workers)
    counted = None if live else visit.ask(audit_api.summary, tenant, **asked)
    chart = None if counted is None or not counted["columns"] else _histogram(visit, counted, tenant, asked)
    return _shown(visit, page, counted, chart)


def _shown(
    visit: PageRequest,
    page: dict[str, Any],
    counted: dict[str, Any] | None,
    chart: TimeChart | None,
    *,
    status: int = 200,
) -> Response:
    live = visit.text("live") is not None
    values = {} if counted is None else {facet["name"]: facet["values"] for facet in counted["facets"]}
    filtered = any(value for name, value in visit.query.items() if name not in ("cursor", "live", "sort"))
    return visit.page(
        "audit/audit.html",
        "Audit explorer",
        status=status,
        found=page,
        rows=_folded(visit, page["items"]),
        kinds=sorted(LEAF_KEYS),
        counted=counted,
        values=values,
        events_of=Counter({each["value"]: each["events"] for each in values.get("kind", ())}),
        chart=chart,
        presets=_presets(visit),
        live=live,
        newest=is_newest(visit),
        all_tenants=sees_all(visit),
        filtered=filtered,
        exported={form: _export_link(visit, form) for form in ("csv", "ndjson")},
    )


def _not_understood(visit: PageRequest, wrong: Mapping[str, Any], detail: str) -> Response:
    """Return the page without leaves, each fault at its filter."""
    visit.wrong.update({name: text if text != visit.query.get(name) else detail for name, text in wrong.items()})
    return _shown(visit, {"items": [], "next": None}, None, None, status=422)


def _folded(visit: PageRequest, items: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the rows of a page of leaves: one leaf each, and the reader's own page views in one (rule 5)."""
    own = [] if visit.text("kind") else [item for item in items if _is_own_view(visit, item)]
    if len(own) < 2:
        return [[item] for item in items]
    return [own if item is own[0] else [item] for item in items if item is own[0] or item not in own]


def _is_own_view(visit: PageRequest, item: dict[str, Any]) -> bool:
    if item["kind"] != "access" or item["leaf"]["actor"] != visit.caller.name:
        return False
    return str(item["leaf"]["operation"]).startswith(PAGE_READ)


def asked_of(visit: PageRequest) -> tuple[str | None, dict[str, Any]]:
    """Return the tenant of a page of leaves, and its other filters by their API names."""
    kind, trace = visit.text("kind"), visit.text("trace")
    if kind is not None:
        known_kind(kind)
    if trace is not None and not is_trace(trace):
        raise FieldError({"trace": "this is no trace id: write 32 lowercase hexadecimal digits, not all zero"})
    asked: dict[str, Any] = {name: visit.text(name) for name in _TEXTS}
    asked |= {name: visit.number(name) for name in _NUMBERS}
    since_us = moment_us(visit, "since")
    preset = visit.text("last")
    if preset is not None and since_us is None:
        if preset not in _PRESETS_US:
            raise ProblemError("invalid", f"`last` is none of {', '.join(_PRESETS_US)}")
        since_us = max(0, (visit.service.clock.utc_us() - _PRESETS_US[preset]) // MINUTE_US * MINUTE_US)
    asked["since"], asked["until"] = since_us, moment_us(visit, "until")
    asked["kind"] = None if kind is None else audit_api.KindName(kind)
    return visit.text("tenant"), asked


def is_newest(visit: PageRequest) -> bool:
    """Return whether a page of leaves starts with the newest."""
    sort = visit.text("sort") or "newest"
    if sort not in ("newest", "oldest"):
        raise ProblemError("invalid", "`sort` is neither newest nor oldest")
    return sort == "newest"


def _presets(visit: PageRequest) -> list[tuple[str, str, bool]]:
    """Return periods that end now: their names, links, and whether one is chosen."""
    chosen = visit.text("last")
    plain = visit.text("since") is None and visit.text("until") is None
    links = [(name, visit.link(last=name, since=None, until=None, cursor=None), chosen == name) for name in _PRESETS_US]
    everything = visit.link(last=None, since=None, until=None, cursor=None)
    return [*links, ("all", everything, chosen is None and plain)]


def _histogram(visit: PageRequest, counted: dict[str, Any], tenant: str | None, asked: dict[str, Any]) -> TimeChart:
    """Return events over time, those that were denied, failed or partial apart (rule 6)."""
    width_us, columns = counted["column_us"], counted["columns"]
    events: Counter[tuple[bool, int]] = Counter()
    for column in columns:
        events[True, column["at_us"]] = column["refused"]
        events[False, column["at_us"]] = column["events"] - column["refused"]
    starts_us = [column["at_us"] for column in columns]
    buckets = Buckets(range(starts_us[0], starts_us[-1] + 1, width_us), width_us)
    fine = _fine_events(visit, tenant, asked) if len(columns) < _FEW or width_us >= HOUR_US else None
    if fine is not None:
        counted_finer, cell_us = fine
        first_us, last_us = min(at_us for _, at_us in counted_finer), max(at_us for _, at_us in counted_finer)
        buckets = Buckets.of(first_us, last_us + 1, least_us=cell_us)
        events = Counter()
        for (is_refused, at_us), number in counted_finer.items():
            events[is_refused, buckets.start_of(at_us)] += number
    series = (
        ChartSeries("events", [events[False, at_us] for at_us in buckets.starts_us], 1),
        ChartSeries("denied, failed or partial", [events[True, at_us] for at_us in buckets.starts_us], 4),
    )
    return TimeChart("Events over time", "count", "bars", buckets, series, "nothing recorded")


def _fine_events(
    visit: PageRequest, tenant: str | None, asked: dict[str, Any]
) -> tuple[Counter[tuple[bool, int]], int] | None:
    """Return events of a short period by whether they were refused, and cell; and how wide a cell is.

    None where there are no such cells.
    """
    kind, outcome = asked["kind"], asked["outcome"]
    if any(value is not None for name, value in asked.items() if name not in ("kind", "outcome", "since", "until")):
        return None
    mine = visit.service.tenant_of(visit.caller, Permission.READ_CUSTODY, tenant)
    with visit.service.reading(mine) as connection:
        span = hour_span(connection)
        if span is None:
            return None
        until_us = visit.service.clock.utc_us() if asked["until"] is None else asked["until"]
        since_us = max(asked["since"] or 0, span[0])
        cells = visit.service.figures.fine.read(connection, since_us, until_us, tenant=mine)
    if cells is None:
        return None
    kinds = None if kind is None else (kind.value,)
    events: Counter[tuple[bool, int]] = Counter()
    for scraped in (False, True):
        for figure in cells.figures((EVENTS,), kinds, scraped=scraped):
            if since_us - cells.width_us < figure.hour_us < until_us and (outcome is None or figure.outcome == outcome):
                events[figure.outcome in REFUSED, figure.hour_us] += figure.value
    return (events, cells.width_us) if events else None


def _export_link(visit: PageRequest, form: str) -> str:
    _, _, query = visit.link(cursor=None, live=None).partition("?")
    return f"/console/audit/export/{form}" + ("?" + query if query else "")


def event(visit: PageRequest) -> Response:
    """Return one leaf: its content, its bytes, and how to check that the ledger holds them."""
    log, idx = visit.text("log"), visit.number("idx")
    if log is None or idx is None:
        raise not_found()
    _seen(visit, log)
    visit.record("consoleEvent")
    own = None if sees_all(visit) else visit.caller.tenant
    with visit.service.reading(own) as connection, audit_api.absent_as(visit.service):
        leaf = LedgerProofs(connection).leaf(log, idx)
    body = orjson.loads(leaf)
    keys = recorded_keys(visit.service.reader)
    return visit.page(
        "audit/event.html",
        f"Event {idx} of {log}",
        log=log,
        idx=idx,
        body=body,
        facts=facts_of(body),
        summary=sentence_of(body),
        links_found=links_of(visit, body, workers_of(visit)),
        canonical=leaf.decode(),
        keys=" ".join(str(period.key) for period in keys),
        key_name=keys[-1].key.name if keys else "",
    )


def moment_us(visit: PageRequest, name: str) -> int | None:
    """Return the moment in a browser's field, read as UTC; None where it is absent."""
    text = visit.text(name)
    if text is None:
        return None
    try:
        found = times.moment_us(text)
    except ValueError:
        raise FieldError({name: "this is not a time: write 2026-01-31T12:00"}) from None
    if not 0 <= found < LARGE:
        raise FieldError({name: "this time is out of range"})
    return found


def _seen(visit: PageRequest, log: str) -> None:
    """Refuse a caller who may not see this log (rule 2)."""
    if log == SYSTEM:
        if not sees_all(visit):
            visit.caller.must(Permission.READ_CUSTODY)
            raise not_found()
        return
    tenant = tenant_of(log)
    if log != log_of(tenant):
        raise not_found()
    visit.caller.tenant_of(Permission.READ_CUSTODY, tenant)


def facts_of(body: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a leaf's fields without its head, readable; a leaf of several events lists each event."""
    if body["kind"] == CHANGED:
        return [(item["kind"].replace("-", " "), sentence_of(item)) for item in plain_bodies(body)]
    offset_us = int(body["at_us"]) - int(body["boot_us"])
    facts = ((name, value) for name, value in body.items() if name not in HEAD_KEYS)
    return [(_named(name), _text(name, value, offset_us)) for name, value in facts]


def _named(name: str) -> str:
    return name.removesuffix(_BOOT).replace("_", " ")


def _moment(at_us: int) -> str:
    """Return a moment, or how far it is from 1970 where no calendar has it."""
    try:
        return moment(at_us)
    except OverflowError:
        return f"{duration(at_us)} after 1970"


def _text(name: str, value: Any, offset_us: int) -> str:
    if name in ("runs", "written", "attached") and isinstance(value, list):
        runs = "run" if len(value) == 1 else "runs"
        return f"{count(len(value))} {runs} of blocks, listed in the canonical bytes"
    if name.endswith(_BOOT) and value:
        moments = value if isinstance(value, list) else [value]
        return ", ".join(_moment(int(each) + offset_us) for each in moments)
    if isinstance(value, list):
        return ", ".join(str(item) for item in value) or "none"
    if value is None or value == "":
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int):
        return str(value)
    if name in DURATIONS:
        return duration(value)
    if name.endswith(_BOOT):
        return "–"
    return _moment(value) if name.endswith(("_us", "_utc")) else count(value)
