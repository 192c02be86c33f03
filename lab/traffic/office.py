"""Requests to the control plane of `kvcustody up` while it runs.

They are erasures, scans of the worker, a report and a schedule for reports, two subject requests, and one request with
an unknown key.

1. They are asked for as through the API, by the principal who would: on record, durable before anything happens.
2. Subjects are those of the workload. Of the two requests one came in long ago and is past its deadline. One erasure is
   asked for when the engine is about to stall, by a deadline that it then misses: so it is seen how that stands out.
3. A folder that is started again has the cases and the schedule of its first start, and gets no others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import cycle

from kvcustody.audit.evidence.cases.case_record import StepKind, SubjectRight
from kvcustody.audit.evidence.cases.read_cases import read_cases
from kvcustody.errors import CustodyError
from kvcustody.governance.api.models.erasures import ErasureRequest
from kvcustody.governance.api.models.evidence import FrameworkName, ScheduleRequest
from kvcustody.governance.api.models.privacy.cases import CaseRequest, StepRequest
from kvcustody.governance.api.models.scan_orders import ScanWanted
from kvcustody.governance.api.operations.erasures import request as request_erasure
from kvcustody.governance.api.operations.fleet import order_scan
from kvcustody.governance.api.operations.privacy.cases import open_case, take_step
from kvcustody.governance.api.operations.reports_and_checks import make_schedule, schedules_of
from kvcustody.governance.api.page_calls import ask
from kvcustody.governance.control_plane.connection import ControlPlaneConnection
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.reports import report_parameters, start_report
from kvcustody.governance.service.schedules.calendar_periods import Cadence
from kvcustody.governance.service.service import Service
from kvcustody.lab.replay.workload.generator import WorkloadSpec, generate
from kvcustody.lab.replay.workload.labels import Label
from kvcustody.logger import get_logger
from kvcustody.times import DAY_US

WORKER, VLLM = "simulated", "vllm"
YOU, BOOTSTRAP = "you", "bootstrap"
PEOPLE: dict[str, tuple[frozenset[Role], str | None]] = {
    YOU: (
        frozenset({Role.DPO, Role.AUDITOR, Role.OPERATOR, Role.APPROVER, Role.KEY_CUSTODIAN}),
        None,
    ),
    "author": (frozenset({Role.AUTHOR}), None),
    "owner": (frozenset({Role.TENANT_ADMIN}), "acme"),
    "dpo-desk": (frozenset({Role.DPO}), None),
    BOOTSTRAP: (frozenset({Role.BOOTSTRAP}), None),
    WORKER: (frozenset({Role.WORKER}), None),
    VLLM: (frozenset({Role.WORKER}), None),
}
_log = get_logger(__name__)
_FIRST_SECONDS, _TURN_SECONDS = 8.0, 40.0
_REPORT_TURN = 2
_SUBJECTS = 64
_MISSES_EVERY = 4  # stalls


class Office:
    """Sends requests on its own thread until it is stopped."""

    def __init__(self, service: Service, spec: WorkloadSpec, tenant_of: Callable[[Label], str], worker: str) -> None:
        """Prepare the requests. `tenant_of`: the tenant that a label of the workload has now."""
        self._service, self._worker = service, worker
        self._tenant_of, self._labels = tenant_of, cycle(generate(spec).labels[:_SUBJECTS])
        self._stop = threading.Event()
        self._stalls = 0
        self._thread = threading.Thread(target=self._run, name="kvcustody-office", daemon=True)

    def start(self) -> None:
        """Start sending requests."""
        self._thread.start()

    def stop(self) -> None:
        """Stop sending requests; a second call does nothing."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(10.0)

    def stalls(self) -> None:
        """Take note that the engine is about to stall (rule 2)."""
        self._stalls += 1
        if self._stalls % _MISSES_EVERY == 1:
            with suppress(CustodyError):
                self._erase(deadline_seconds=1)

    def _run(self) -> None:
        pause, turn = _FIRST_SECONDS, 0
        while not self._stop.wait(pause):
            pause, turn = _TURN_SECONDS, turn + 1
            try:
                self._erase(deadline_seconds=60)
                ask(self._service, _caller(YOU), order_scan, self._worker, ScanWanted(deadline_seconds=60))
                if turn == _REPORT_TURN:
                    self.make_report()
                    self.open_cases()
                with ControlPlaneConnection(f"http://{self._service.settings.listen}", "nobodys-key") as wrong:
                    wrong.get("/v1/whoami")
            except CustodyError as error:  # the tenant has sent nothing yet, or the service ends
                _log.info("not asked for", reason=error.message)

    def _erase(self, *, deadline_seconds: int) -> None:
        tenant, subject = self._next_subject()
        what = ErasureRequest(tenant=tenant, subject=subject, deadline_seconds=deadline_seconds)
        ask(self._service, _caller("dpo-desk"), request_erasure, what)

    def _next_subject(self) -> tuple[str, str]:
        """Return a tenant, and a subject of it."""
        label = next(self._labels)
        return self._tenant_of(label), label.subject

    def open_cases(self) -> None:
        """Open two cases, one past its deadline, where no earlier start did (rule 3)."""
        service, caller = self._service, _caller("dpo-desk")
        with service.reading() as connection:
            if any(case.opened.actor == caller.name for case in read_cases(connection)):
                return
        for days in (2, 40):
            tenant, subject = self._next_subject()
            received = service.clock.utc_us() - days * DAY_US
            what = CaseRequest(
                tenant=tenant, subject=subject, right=SubjectRight.ERASURE, channel="mail", received=received
            )
            case = ask(service, caller, open_case, what)["case_id"]
        confirmed = StepRequest(step=StepKind.IDENTITY, outcome="confirmed")
        ask(service, caller, take_step, case, confirmed)

    def make_report(self) -> None:
        """Make a report, and a schedule where no earlier start did (rule 3)."""
        service, caller = self._service, _caller(YOU)
        if not any(each.principal == caller.name for each in schedules_of(service, caller)):
            self._schedule(caller)
        asked = report_parameters(service, "gdpr", None, since_us=None, until_us=None, as_of=None)
        start_report(service, caller.name, asked, service.documents.formats(), party=caller.party)

    def _schedule(self, caller: Caller) -> None:
        schedule = ScheduleRequest(framework=FrameworkName("soc2"), every=Cadence.MONTHLY)
        ask(self._service, caller, make_schedule, schedule)


def _caller(name: str) -> Caller:
    roles, tenant = PEOPLE[name]
    return Caller(name, roles, tenant, "local")
