"""A service's metrics as samples for `governance.metrics`: its writer, its workers, the ledger, its requests.

1. What the ledger says is read from its figures (`evidence.counters`): no leaf and no row of evidence is looked at, and
   of tenants no more rows than labels are shown. It is read at most every ten seconds, whoever asks. Route receipts
   of the last ten minutes are read as rows, the newest 20,000 of them, at most every 30 seconds (`route_samples`).
2. A scrape waits for no database (`MetricsCollector`): what comes of it says how old it is, and whether reading fails.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple, Protocol

import anyio
from sqlalchemy import Connection

from kvcustody.audit.evidence.counters.hourly_coverage import judged_state, recent_sums
from kvcustody.audit.evidence.counters.read_figures import denials_by_rule, largest_tenants, orphans_by_class
from kvcustody.audit.evidence.routes.route_measures import measure as measure_routes
from kvcustody.audit.evidence.routes.route_receipts import RoutePeriod, by_problem, read_routes
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.root_sealer import unsealed
from kvcustody.clock import MICROSECONDS
from kvcustody.deadline_clock import DeadlineClock
from kvcustody.governance.credentials.service_secret import ServiceSecret, keyed_digest
from kvcustody.governance.observability.attempts import AttemptsReporter
from kvcustody.governance.observability.metrics import OTHER, Sample, of_worker
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.epochs.epoch_book import EpochBook
from kvcustody.governance.service.epochs.epoch_takers import EpochTaker
from kvcustody.governance.service.fleet.metrics_collector import Collected, MetricsCollector
from kvcustody.governance.service.fleet.webhooks import Sinks
from kvcustody.governance.service.fleet.workers import Fleet, WorkerRun
from kvcustody.governance.service.health.verdict import ServiceVerdict, TroubleKind
from kvcustody.governance.service.inbox.read_inbox import InboxContents
from kvcustody.governance.service.ingest.ingest import Ingest
from kvcustody.governance.service.ingest.traced_writer import TracedWriter
from kvcustody.governance.service.schedules.made_reports import Verdicts, report_figures, undelivered
from kvcustody.governance.service.settings import ServiceSettings
from kvcustody.times import SECOND_US

_FRESH_SECONDS = 10.0
PATIENCE_SECONDS = 0.02  # of a scrape, with what is read anew
Place = tuple[str, tuple[str, ...]]
_BY_TENANT = {
    "charged": "kv_cache_charged_blocks",
    "active_tokens": "tenant_active_tokens",
    "recomputed_blocks": "tenant_recomputed_blocks",
    "thrashing": "tenant_cache_thrashing",
}  # what workers say of tenants, and the metric that it is


FRESH_SECONDS: Final = 30.0
WINDOW_US: Final = 600 * SECOND_US
HALVES_MAX: Final = 20_000


class MeasuredService(Protocol):
    """The parts of a service that are measured."""

    settings: ServiceSettings
    secret: ServiceSecret
    clock: DeadlineClock
    writer: TracedWriter

    @property
    def ingest(self) -> Ingest:
        """Takes workers' leaves in."""

    @property
    def fleet(self) -> Fleet:
        """The register of workers."""

    @property
    def epochs(self) -> EpochBook:
        """Erase epochs, and who acts by them."""

    @property
    def signer(self) -> CheckpointSigner | None:
        """The signer of checkpoints; None where another process signs."""

    @property
    def attempts(self) -> AttemptsReporter:
        """The refused credentials."""

    @property
    def verdict(self) -> ServiceVerdict:
        """The verdict on the service."""

    @property
    def sinks(self) -> Sinks:
        """The webhooks."""

    @property
    def verdicts(self) -> Verdicts:
        """The verdicts of reports."""

    def reading(self) -> AbstractContextManager[Connection]:
        """A connection in one read transaction."""

    def inbox(self) -> InboxContents:
        """The open tasks, and their dates."""


class _OfLedger(NamedTuple):
    """What was read of the ledger, and the tenants that have a label of their own in it."""

    samples: tuple[Sample, ...]
    shown: frozenset[str]


class _OfFleet(NamedTuple):
    """Workers at work, and who takes erase epochs."""

    running: tuple[WorkerRun, ...] = ()
    takers: tuple[EpochTaker, ...] = ()


class ServiceMetrics:
    """Collects the samples of one service; its gate fills `requests` by (operation, status). Close it."""

    def __init__(self, service: MeasuredService) -> None:
        self._service = service
        self.requests: dict[tuple[str, int], list[float]] = {}  # how many, and their seconds
        self.threads = anyio.CapacityLimiter(2)  # of scrapes alone: they wait for no other request's
        self._label_key = service.secret.key("tenant-label")
        self._shown: frozenset[str] = frozenset()
        self.workers = MetricsCollector("workers", self._read_fleet)
        self.routes = MetricsCollector("routes", self._read_routes, fresh_seconds=FRESH_SECONDS)
        self.ledger = MetricsCollector("ledger", self._read_ledger, fresh_seconds=_FRESH_SECONDS)

    def close(self) -> None:
        """Stop reading."""
        self.workers.close()
        self.routes.close()
        self.ledger.close()

    def samples(self) -> Iterator[Sample]:
        """Return every sample: present values, and the last readings of the database (rule 2)."""
        until = time.monotonic() + PATIENCE_SECONDS
        for collector in (self.ledger, self.workers, self.routes):
            collector.ask()
        yield from self._own()
        ledger = self.ledger.latest(until - time.monotonic())
        workers = self.workers.latest(until - time.monotonic())
        routes = self.routes.latest(until - time.monotonic())
        if ledger.value is not None:
            self._shown = ledger.value.shown
        fleet = workers.value or _OfFleet()
        yield from self._workers(fleet.running)
        yield from _of_takers(fleet.takers, self._service.clock.utc_us())
        yield from ledger.value.samples if ledger.value is not None else ()
        yield from routes.value or ()
        yield from _ages((self.ledger.name, ledger), (self.workers.name, workers), (self.routes.name, routes))
        for (operation, status), (count, seconds) in sorted(self.requests.items()):
            yield "http_requests_total", (operation, str(status)), count
            yield "http_request_seconds_total", (operation, str(status)), seconds

    def _own(self) -> Iterator[Sample]:
        service = self._service
        for reason, count in sorted(service.attempts.attempts.totals.items()):
            yield "credentials_refused_total", (reason,), float(count)
        wrong = {one.kind for one in service.verdict.troubles()}
        for kind in TroubleKind:
            yield "service_trouble", (kind.value,), float(kind in wrong)
        status = service.writer.status()
        yield "ledger_admitting", (), float(status.admitting)
        yield "ledger_backlog_events", (), status.backlog
        yield "ledger_spilled_bytes", (), status.spilled_bytes
        yield "ledger_received_leaves_total", (), service.ingest.stored_leaves
        for part, value in service.ingest.seconds.copy().figures(""):
            yield "batch_commit_seconds", (part.removeprefix("."),), value
        if service.signer is not None:
            signed = service.signer.status()
            yield "ledger_checkpoint_size", (), signed.size
            if signed.at_us:
                age_us = max(0, service.clock.utc_us() - signed.at_us)
                yield "ledger_checkpoint_age_seconds", (), age_us / MICROSECONDS

        now_us = service.clock.utc_us()
        for sink in service.sinks.listed():
            since_us, labels = sink.failing_since_us, (sink.name,)
            yield "sink_delivered_leaves_total", labels, sink.delivered
            failing_us = 0 if since_us is None or not sink.attached else max(0, now_us - since_us)
            yield "sink_failing_seconds", labels, failing_us / MICROSECONDS
            yield "sink_dead_batches", labels, sink.dead
            yield "sink_restarted_logs_total", labels, sink.restarted
            yield "sink_purged_leaves_total", labels, sink.purged
            yield "sink_losses_unseen", labels, len(sink.losses)

    def _workers(self, running: Iterable[WorkerRun]) -> Iterator[Sample]:
        by_tenant: Counter[Place] = Counter()
        for worker in running:
            name = worker.worker
            if worker.received_sequence or worker.status:
                yield "worker_up", (name,), float(not worker.silent)
                yield "worker_policy_revision", (name,), worker.policy_revision
                yield "worker_received_sequence", (name,), worker.received_sequence
                yield from of_worker(name, worker.status)
            self._add_tenants(worker, by_tenant)
        for (name, labels), value in sorted(by_tenant.items()):
            yield name, labels, value

    def _read_fleet(self) -> _OfFleet:
        return _OfFleet(tuple(self._service.fleet.running()), tuple(self._service.epochs.takers.listed()))

    def _add_tenants(self, worker: WorkerRun, totals: Counter[Place]) -> None:
        """What a worker says of tenants: added up, but for what is so or not."""
        for measure, values in ({"charged": worker.charged} | worker.tenants).items():
            name = _BY_TENANT.get(measure)
            if name is None:
                continue
            for tenant, value in values.items():
                place = (name, (self._label(tenant, self._shown),))
                totals[place] = max(totals[place], int(value)) if measure == "thrashing" else totals[place] + int(value)

    def _read_routes(self) -> tuple[Sample, ...]:
        with self._service.reading() as connection:
            return tuple(route_samples(connection, self._service.clock.utc_us()))

    def _read_ledger(self) -> _OfLedger:
        now_us = self._service.clock.utc_us()
        with self._service.reading() as connection:
            tenants = largest_tenants(connection, self._service.settings.tenant_labels_max)
            recent = recent_sums(connection, tenants.leaves)
            state = judged_state(connection)
            denials = denials_by_rule(connection)
            orphans = orphans_by_class(connection)
            waiting = unsealed(connection, now_us)
            reports = [*_of_reports(connection, now_us, self._service.verdicts)]
        shown = frozenset(tenants.leaves)
        added: Counter[Place] = Counter()
        for tenant, number in tenants.leaves.items():
            added["ledger_leaves", (self._label(tenant, shown),)] += number
        if tenants.others:
            added["ledger_leaves", (OTHER,)] += tenants.others
        due: Counter[str] = Counter()
        covered: Counter[str] = Counter()
        for sums in recent:
            label = self._label(sums.tenant, shown)
            due[label] += sums.due
            covered[label] += sums.covered
            added["deletion_due_units", (label,)] += sums.due
            added["deletion_covered_units", (label,)] += sums.covered
            added["deletion_overdue_units", (label,)] += sums.overdue
            added["deletion_unproven_units", (label,)] += sums.unproven
        for denial in denials:
            added["reuse_denied_requests_total", (self._label(denial.reader, shown), denial.rule)] += denial.requests
        for orphan, number in orphans.items():
            added["orphan_findings", (orphan,)] += number
        samples: list[Sample] = [(name, labels, value) for (name, labels), value in sorted(added.items())]
        for label in sorted(due):
            ratio = covered[label] / due[label] if due[label] else 1.0
            samples.append(("deletion_coverage_ratio", (label,), ratio))
        samples.append(("ledger_unsealed_leaves", (), waiting.leaves))
        samples.append(("ledger_unsealed_age_seconds", (), waiting.age_us / MICROSECONDS))
        if state is not None:
            lag_us = max((sums.lag_us_max for sums in recent), default=0)
            samples.append(("deletion_lag_seconds_max", (), lag_us / MICROSECONDS))
            samples.append(("deletion_judged_age_seconds", (), max(0, now_us - state.at_us) / MICROSECONDS))
        samples += reports
        samples += _of_inbox(self._service.inbox(), now_us)
        return _OfLedger(tuple(samples), shown)

    def _label(self, tenant: str, shown: Collection[str]) -> str:
        """How a tenant appears: bounded, and by pseudonym unless the settings say otherwise."""
        how = self._service.settings.tenant_labels
        if how == "none" or tenant not in shown:
            return OTHER
        return tenant if how == "name" else "t-" + keyed_digest(self._label_key, tenant.encode())[:12]


def _of_takers(takers: Iterable[EpochTaker], now_us: int) -> Iterator[Sample]:
    """Who was heard in the last minute and lacks the newest erase epoch, and for how long."""
    behind = [one for one in takers if one.state == "behind"]
    for role in (Role.DOOR.value, Role.WORKER.value):
        yield "epoch_takers_behind", (role,), sum(one.role == role for one in behind)
    since_us = min((one.behind_since_us for one in behind if one.behind_since_us is not None), default=now_us)
    yield "epoch_behind_seconds", (), max(0, now_us - since_us) / MICROSECONDS


def _of_inbox(inbox: InboxContents, now_us: int) -> Iterator[Sample]:
    """What waits for somebody, and when what ends will."""
    items = Counter((item.kind.value, item.state.value) for item in inbox.items)
    for labels, number in sorted(items.items()):
        yield "inbox_items", labels, number
    for state, number in inbox.erasures.items():
        yield "erasures", (state.value,), number
    if inbox.next_deadline_us is not None:
        yield "erasure_next_deadline_seconds", (), max(0, inbox.next_deadline_us - now_us) / MICROSECONDS
    overdue_us = 0 if inbox.missed_deadline_us is None else max(0, now_us - inbox.missed_deadline_us)
    yield "erasure_overdue_seconds_max", (), overdue_us / MICROSECONDS
    for case_state, number in inbox.cases.items():
        yield "subject_cases", (case_state.value,), number
    if inbox.next_case_us is not None:
        yield "subject_case_next_deadline_seconds", (), max(0, inbox.next_case_us - now_us) / MICROSECONDS
    missed_us = 0 if inbox.missed_case_us is None else max(0, now_us - inbox.missed_case_us)
    yield "subject_case_overdue_seconds_max", (), missed_us / MICROSECONDS
    for kind, ends_us in sorted(inbox.ends.items()):
        yield "next_end_seconds", (kind.value,), (ends_us - now_us) / MICROSECONDS
    yield "ledger_witnesses", (), inbox.witnesses
    yield "ledger_unwitnessed_seconds", (), inbox.unwitnessed_us / MICROSECONDS


def _of_reports(connection: Connection, now_us: int, verdicts: Verdicts) -> Iterator[Sample]:
    """Schedules, what they made, and what was not taken."""
    for name, by_state in report_figures(connection, verdicts).items():
        for state, number in sorted(by_state.items()):
            yield name, (state,), number
    failing = undelivered(connection)
    yield "report_undelivered", (), len(failing)
    oldest_us = min((one.since_us for one in failing), default=now_us)
    yield "report_undelivered_seconds_max", (), max(0, now_us - oldest_us) / MICROSECONDS


def _ages(*every: tuple[str, Collected[Any]]) -> Iterator[Sample]:
    """How old what a scrape shows is, and whether reading it fails."""
    for name, found in every:
        if found.age_seconds is not None:
            yield "metrics_collector_age_seconds", (name,), found.age_seconds
        yield "metrics_collector_success", (name,), float(not found.failing and found.value is not None)


def route_samples(connection: Connection, now_us: int) -> Iterator[Sample]:
    """Yield the samples of route receipts; none where no request of that time has one."""
    period = RoutePeriod(now_us - WINDOW_US, now_us + 1)
    joined = read_routes(connection, period, now_us=now_us, halves_max=HALVES_MAX)
    if not joined.receipts:
        return
    measures = measure_routes(joined.receipts)
    yield "route_receipts", (), len(joined.receipts)
    yield "route_receipts_awaited", (), joined.awaited
    for problem, number in by_problem(joined.findings).items():
        yield "route_findings", (problem,), number
    if measures.queue_delta_mean is not None:
        yield "route_queue_delta", (), measures.queue_delta_mean
    if measures.imbalance is not None:
        yield "route_imbalance", (), measures.imbalance
    if measures.promises:
        yield "route_promised_tokens", (), measures.promised_tokens
        yield "route_promised_found_tokens", (), measures.kept_tokens
    for worker in measures.workers:
        labels = (worker.worker,)
        yield "route_requests", labels, worker.requests
        if worker.locality is not None:
            yield "route_locality_ratio", labels, worker.locality
        yield "route_hit_tokens_mean", labels, worker.found_tokens / worker.requests
        yield "route_queue_mean", labels, worker.queue_mean
        yield "route_free_blocks", labels, worker.free_blocks_last
        if worker.promises:
            yield "route_stale_misses", labels, worker.stale_misses
