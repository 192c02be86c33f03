"""The application: every operation behind the gate, and room for a console's pages.

P1 `create_app(service)` is all that a server needs; `pages` are what a console adds, and `workers_only` cuts it down to
   what workers may ask.
"""

from __future__ import annotations

from kvcustody.governance.api.audit import add_audit
from kvcustody.governance.api.builder import Api
from kvcustody.governance.api.custody import add_custody
from kvcustody.governance.api.enrolment import add_enrolment
from kvcustody.governance.api.erasures import add_erasures
from kvcustody.governance.api.evidence import add_evidence
from kvcustody.governance.api.gate import Gate
from kvcustody.governance.api.grants import add_grants
from kvcustody.governance.api.health import add_health
from kvcustody.governance.api.jobs import add_jobs
from kvcustody.governance.api.key_custody import add_key_custody
from kvcustody.governance.api.operating import add_operating
from kvcustody.governance.api.pages_port import Pages
from kvcustody.governance.api.policies import add_policies
from kvcustody.governance.api.principal_endings import add_principal_endings
from kvcustody.governance.api.scan_orders import add_scan_orders
from kvcustody.governance.api.self_service import add_self_service
from kvcustody.governance.api.stream import add_stream
from kvcustody.governance.api.workbench import add_workbench
from kvcustody.governance.api.workers import add_workers
from kvcustody.governance.service.service import Service

_GROUPS = (
    add_health,
    add_self_service,
    add_enrolment,
    add_principal_endings,
    add_key_custody,
    add_custody,
    add_audit,
    add_stream,
    add_erasures,
    add_workbench,
    add_grants,  # before the revisions, whose paths have a number in this place
    add_policies,
    add_evidence,
    add_jobs,
    add_operating,
    add_scan_orders,
    add_workers,
)


def create_api(service: Service | None) -> Api:
    """Every operation of version 1."""
    api = Api(service)
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
