"""What a service measures, as samples for `governance.metrics`: its writer, its workers, the ledger, its requests.

1. What the ledger says is read from its figures (`audit.counters`): no leaf and no row of evidence is looked at. The
   database is asked at most every ten seconds, whoever asks.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from sqlalchemy import Connection

from kvcustody.audit.counters.hourly_coverage import recent
from kvcustody.audit.counters.read_figures import denials_by_rule, leaves_by_tenant, orphans_by_class
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.root_sealer import unsealed
from kvcustody.clock import MICROSECONDS
from kvcustody.deadline_clock import DeadlineClock
from kvcustody.governance.observability.attempts import AttemptsReporter
from kvcustody.governance.observability.metrics import OTHER, Sample, of_worker
from kvcustody.governance.service.access.service_secret import ServiceSecret, keyed_digest
from kvcustody.governance.service.fleet.workers import Fleet
from kvcustody.governance.service.ingest.ingest import Ingest
from kvcustody.governance.service.ingest.traced_writer import TracedWriter
from kvcustody.governance.service.settings import ServiceSettings

_FRESH_SECONDS = 10.0
_BY_TENANT = {
    "active_tokens": "tenant_active_tokens",
    "recomputed_blocks": "tenant_recomputed_blocks",
    "thrashing": "tenant_cache_thrashing",
}  # what workers say of tenants, and the metric that it is


class MeasuredService(Protocol):
    """The parts of a service that are measured."""

    settings: ServiceSettings
    secret: ServiceSecret
    clock: DeadlineClock
    writer: TracedWriter
    ingest: Ingest
    fleet: Fleet
    signer: CheckpointSigner | None
    attempts: AttemptsReporter

    def reading(self) -> AbstractContextManager[Connection]:
        """A connection in one read transaction."""


class ServiceMetrics:
    """Collects the samples of one service; `requests` is filled by its gate, by (operation, status)."""

    def __init__(self, service: MeasuredService) -> None:
        self._service = service
        self.requests: dict[tuple[str, int], list[float]] = {}  # how many, and their seconds
        self._label_key = service.secret.key("tenant-label")
        self._lock = threading.Lock()
        self._ledger: list[Sample] = []
        self._asked = -_FRESH_SECONDS

    def samples(self) -> Iterator[Sample]:
        """Everything, now."""
        yield from self._own()
        yield from self._workers()
        with self._lock:
            if time.monotonic() - self._asked >= _FRESH_SECONDS:
                self._ledger, self._asked = list(self._of_ledger()), time.monotonic()
            found = self._ledger
        yield from found
        for (operation, status), (count, seconds) in sorted(self.requests.items()):
            yield "http_requests_total", (operation, str(status)), count
            yield "http_request_seconds_total", (operation, str(status)), seconds

    def _own(self) -> Iterator[Sample]:
        service = self._service
        for reason, count in sorted(service.attempts.attempts.totals.items()):
            yield "credentials_refused_total", (reason,), float(count)
        status = service.writer.status()
        yield "ledger_admitting", (), float(status.admitting)
        yield "ledger_backlog_events", (), status.backlog
        yield "ledger_spilled_bytes", (), status.spilled_bytes
        yield "ledger_received_leaves_total", (), service.ingest.stored_leaves
        if service.signer is not None:
            signed = service.signer.status()
            yield "ledger_checkpoint_size", (), signed.size
            if signed.at_us:
                age_us = max(0, service.clock.utc_us() - signed.at_us)
                yield "ledger_checkpoint_age_seconds", (), age_us / MICROSECONDS

    def _workers(self) -> Iterator[Sample]:
        for worker in self._service.fleet.running():
            name = worker.worker
            if worker.received_sequence or worker.status:
                yield "worker_up", (name,), float(not worker.silent)
                yield "worker_policy_revision", (name,), worker.policy_revision
                yield "worker_received_sequence", (name,), worker.received_sequence
                yield from of_worker(name, worker.status)

    def _of_ledger(self) -> Iterator[Sample]:
        now_us = self._service.clock.utc_us()
        with self._service.reading() as connection:
            leaves = leaves_by_tenant(connection)
            found = recent(connection)
            denials = denials_by_rule(connection)
            orphans = orphans_by_class(connection)
            waiting = unsealed(connection, now_us)
        busiest = sorted(leaves, key=lambda tenant: (-leaves[tenant], tenant))
        shown = set(busiest[: self._service.settings.tenant_labels_max])
        added: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for tenant, number in leaves.items():
            added["ledger_leaves", (self._label(tenant, shown),)] += number
        for worker in self._service.fleet.running():
            for tenant, blocks in worker.charged.items():
                added["kv_cache_charged_blocks", (self._label(tenant, shown),)] += blocks
            for measure, name in _BY_TENANT.items():
                for tenant, value in worker.tenants.get(measure, {}).items():
                    place = (name, (self._label(tenant, shown),))
                    if measure == "thrashing":
                        added[place] = max(added[place], int(value))
                    else:
                        added[place] += int(value)
        due: Counter[str] = Counter()
        covered: Counter[str] = Counter()
        for unit in found.rows:
            label = self._label(unit.tenant, shown)
            due[label] += unit.due
            covered[label] += unit.covered
            added["deletion_due_units", (label,)] += unit.due
            added["deletion_covered_units", (label,)] += unit.covered
            added["deletion_overdue_units", (label,)] += unit.overdue
            added["deletion_unproven_units", (label,)] += unit.unproven
        for denial in denials:
            added["reuse_denied_requests_total", (self._label(denial.reader, shown), denial.rule)] += (
                denial.requests
            )
        for orphan, number in orphans.items():
            added["orphan_findings", (orphan,)] += number
        for (name, labels), value in sorted(added.items()):
            yield name, labels, value
        for label in sorted(due):
            yield "deletion_coverage_ratio", (label,), covered[label] / due[label] if due[label] else 1.0
        yield "ledger_unsealed_leaves", (), waiting.leaves
        yield "ledger_unsealed_age_seconds", (), waiting.age_us / MICROSECONDS
        if found.state is not None:
            yield "deletion_lag_seconds_max", (), found.lag_us_max / MICROSECONDS
            yield "deletion_judged_age_seconds", (), max(0, now_us - found.state.at_us) / MICROSECONDS

    def _label(self, tenant: str, shown: set[str]) -> str:
        """How a tenant appears: bounded, and by pseudonym unless the settings say otherwise."""
        how = self._service.settings.tenant_labels
        if how == "none" or tenant not in shown:
            return OTHER
        return tenant if how == "name" else "t-" + keyed_digest(self._label_key, tenant.encode())[:12]
