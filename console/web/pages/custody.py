"""Custody: what is held now and until when, and everything about one subject."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from kvcustody.audit.evidence.processes.work_periods import at_work
from kvcustody.audit.evidence.query.live_residencies import Live, live_residencies
from kvcustody.audit.evidence.subjects.subject_table import subject_names
from kvcustody.audit.reports.subject_access import recent_subject, subject_page
from kvcustody.console.render.time_chart import ChartSeries, NameChart
from kvcustody.console.web import event_links
from kvcustody.console.web.page_request import PageRequest
from kvcustody.console.web.pages.overview import sees_all
from kvcustody.governance.service.access.roles import Permission
from kvcustody.governance.service.problem_details import ProblemError

READ = Permission.READ_CUSTODY
_READ_MAX, _SHOWN_MAX = 5000, 100
_OF_PROCESS_MIN = 500  # requests of a process that the page looks at; all of them where it is asked to
_OF_SUBJECT_MAX = 200  # residencies of a subject that its page shows; where asked to, it counts all of them
_BINS = 10


def live(visit: PageRequest) -> Response:
    """Return live residencies, those nearest to their deadline first, and their ages."""
    tenant_name = visit.text("tenant")
    tenant = visit.service.tenant_of(visit.caller, READ, tenant_name)
    visit.record("consoleCustody", tenant=tenant)
    now_us, periods = visit.service.clock.utc_us(), visit.service.work_periods()
    newest = None if visit.text("all") is not None else max(_OF_PROCESS_MIN, _READ_MAX // max(1, len(at_work(periods))))
    with visit.service.reading(tenant) as connection:
        residencies = live_residencies(
            connection, now_us=now_us, tenant=tenant, limit=_READ_MAX, periods=periods, newest=newest
        )
    ordered = sorted(residencies, key=lambda item: (not item.until_us, item.until_us))
    return visit.page(
        "audit/custody.html",
        "Custody",
        tenant=tenant_name or tenant,
        all_tenants=sees_all(visit),
        erases=visit.may(Permission.ERASE),
        newest=newest,
        shown=ordered[:_SHOWN_MAX],
        subject_page=event_links.subject_page,
        residency_page=event_links.residency_page,
        held=len(residencies),
        more=len(residencies) == _READ_MAX,
        late=sum(1 for item in residencies if item.used_share(now_us) > 1),
        chart=_ages(residencies, now_us),
    )


def subject(visit: PageRequest) -> Response:
    """Return what is held about one subject, why and until when, its erasures, and the form for another.

    A subject is asked for by its name, or by one pseudonym of it, as leaves have it: then there is no form. The
    newest residencies are looked at; where it is asked to, all of them, with the coverage of their blocks.
    """
    name, pseudonym = visit.text("subject", 128), visit.text("pseudonym", 128)
    tenant_name = visit.text("tenant")
    tenant = visit.service.tenant_of(visit.caller, READ, tenant_name)
    if tenant is None or (name or pseudonym) is None:
        raise ProblemError("invalid", "give the tenant and the name of the subject")
    visit.record("consoleSubject", tenant=tenant)
    pseudonyms = [str(pseudonym)] if name is None else visit.service.names_of(tenant, name)
    now_us, periods = visit.service.clock.utc_us(), visit.service.work_periods()
    marked = visit.service.marked()
    beside: dict[str, Any] = {"now_us": now_us, "periods": periods, "marked": marked}
    recent, own = None, None
    if name is not None:
        with visit.service.reading() as connection:
            own = subject_names(connection, tenant, name, visit.service.subject_keys)
    with visit.service.reading(tenant) as connection:
        if visit.text("all") is None:
            recent = recent_subject(connection, tenant, pseudonyms, newest=_OF_SUBJECT_MAX, own=own, **beside)
            page = recent.page
        else:
            page = subject_page(connection, tenant, pseudonyms, **beside)
    return visit.page(
        "erasure/subject.html",
        "One subject",
        tenant=tenant_name or tenant,
        name=name or pseudonym,
        by_pseudonym=name is None,
        found=page,
        recent=recent,
        shown=page.holdings[:_OF_SUBJECT_MAX],
        residency_page=event_links.residency_page,
        erases=visit.may(Permission.ERASE) and name is not None,
    )


def _ages(found: Sequence[Live], now_us: int) -> NameChart:
    """Return residencies by the elapsed share of their time."""
    bins = [[0, 0] for _ in range(_BINS + 1)]
    for item in found:
        share = item.used_share(now_us)
        bins[min(_BINS, int(share * _BINS))][1 if share > 1 else 0] += 1
    labels = [f"{10 * place}–{10 * place + 10} %" for place in range(_BINS)] + ["over 100 %"]
    within, past = zip(*bins, strict=True)
    series = (ChartSeries("within the deadline", within, 1), ChartSeries("past the deadline", past, 4))
    return NameChart(
        "Live residencies by the share of their time that has passed", "count", "Share of the time", labels, series
    )
