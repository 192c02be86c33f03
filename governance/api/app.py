"""The application: every operation behind the gate, and room for a console's pages.

1. `create_app(service)` is all that a server needs; `pages` are what a console adds, and `workers_only` cuts it down
   to what workers may ask.
"""

from __future__ import annotations

from functools import cache

from kvcustody.governance.api.http.console_mount import Pages
from kvcustody.governance.api.http.gate import Gate
from kvcustody.governance.api.http.route_builder import Api
from kvcustody.governance.api.operations.audit import add_audit
from kvcustody.governance.api.operations.custody import add_custody
from kvcustody.governance.api.operations.erasures import add_erasures
from kvcustody.governance.api.operations.event_stream import add_stream
from kvcustody.governance.api.operations.fleet import add_fleet, add_scan_orders
from kvcustody.governance.api.operations.grants import add_grants
from kvcustody.governance.api.operations.health import add_health
from kvcustody.governance.api.operations.jobs import add_jobs
from kvcustody.governance.api.operations.key_custody import add_key_custody
from kvcustody.governance.api.operations.policy_release import add_policies
from kvcustody.governance.api.operations.policy_workbench import add_workbench
from kvcustody.governance.api.operations.principals import (
    add_enrolment,
    add_principal_endings,
    add_self_service,
)
from kvcustody.governance.api.operations.privacy.cases import add_cases
from kvcustody.governance.api.operations.privacy.processing_records import add_processing_records
from kvcustody.governance.api.operations.reports_and_checks import add_evidence
from kvcustody.governance.api.operations.tiers import add_tiers
from kvcustody.governance.api.operations.workers import add_workers
from kvcustody.governance.service.service import Service

_GROUPS = (
    add_health,
    add_self_service,
    add_enrolment,
    add_principal_endings,
    add_key_custody,
    add_custody,
    add_tiers,
    add_audit,
    add_stream,
    add_erasures,
    add_cases,
    add_workbench,
    add_grants,  # before the revisions, whose paths have a number in this place
    add_policies,
    add_evidence,
    add_processing_records,
    add_jobs,
    add_fleet,
    add_scan_orders,
    add_workers,
)


def create_api(service: Service | None) -> Api:
    """Every operation of version 1. The document alone needs no `service`."""
    return Api(service, _declared())


@cache
def _declared() -> Api:
    """Every operation, once in a process: what an operation asks of FastAPI does not depend on the service."""
    api = Api(None)
    for add in _GROUPS:
        add(api)
    return api


def create_app(service: Service, *, workers_only: bool = False, pages: Pages | None = None) -> Gate:
    """The ASGI application of a service."""
    api = create_api(service)
    return Gate(
        api.app,
        api.operations,
        service,
        queries=api.queries(),
        reads=api.reads(),
        workers_only=workers_only,
        pages=pages,
    )
