"""The control plane's parts, opened in order and closed in reverse: what every operation of the API stands on.

1. Nothing is answered before the ledger's writer runs, and the writer ends after the last request has.
2. `record` returns once a class A event is durable, or raises: what it guards then does not happen.
3. Reads run on connections that cannot write.
4. However it comes to close, its own orderly end is the last that it records, and is signed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import cached_property
from types import TracebackType

import structlog
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from kvcustody.audit.evidence.processes.enforcement import worker_enforcement
from kvcustody.audit.evidence.processes.marked_processes import Marked, read_marked
from kvcustody.audit.evidence.processes.orders import AUTHENTICATED
from kvcustody.audit.evidence.processes.running_policies import read_running_policies
from kvcustody.audit.evidence.processes.work_periods import WorkPeriod, read_work_periods
from kvcustody.audit.evidence.query.issuers import RememberedIssuers, named_tenant
from kvcustody.audit.evidence.subjects.subject_key_store import SubjectKeys
from kvcustody.audit.evidence.subjects.subject_table import has_tags, names_of
from kvcustody.audit.kinds import Event
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.database.private_copy import at_rest
from kvcustody.audit.store.database.signed_orders import NO_KEY, SignedOrders, authenticate
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.ledger_identity import ledger_identity
from kvcustody.audit.tlog.signed_note import KeyKind
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.audit.write.event_writer import Awaited, WriterSettings
from kvcustody.clock import Clock
from kvcustody.errors import ConfigError, CustodyError, IdentityError, LedgerError, UnsignedOrderError
from kvcustody.governance.credentials.api_key import KeyHasher
from kvcustody.governance.credentials.service_secret import open_secret
from kvcustody.governance.identity.principal import check_tenant_name
from kvcustody.governance.keys.checkpoint_signing_key import memory_of, open_signing_key, recorded_keys
from kvcustody.governance.observability.attempts import Attempts, AttemptsReporter, events_of
from kvcustody.governance.release.order_signing import read_signed_orders
from kvcustody.governance.release.policies_in_effect import PoliciesInEffect, policies_in_effect
from kvcustody.governance.release.replay_records import ReleaseState
from kvcustody.governance.service.access.authenticator import ServiceAuthenticator
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.oidc_token import OidcTokens
from kvcustody.governance.service.access.principals import Principals
from kvcustody.governance.service.access.rate_limit import RateLimiter
from kvcustody.governance.service.access.roles import Permission, Reach
from kvcustody.governance.service.access.sessions import Sessions
from kvcustody.governance.service.access.sign_in_links import SignInLinks
from kvcustody.governance.service.fleet.dead_workers import DeadWorkers
from kvcustody.governance.service.fleet.exports import Exports
from kvcustody.governance.service.fleet.figure_keeper import FigureKeeper
from kvcustody.governance.service.fleet.ledger_scan import LedgerScans
from kvcustody.governance.service.fleet.metrics_samples import ServiceMetrics
from kvcustody.governance.service.fleet.policy_releases import PolicyReleases
from kvcustody.governance.service.fleet.webhooks import Sinks
from kvcustody.governance.service.fleet.workers import Fleet
from kvcustody.governance.service.idempotency import IdempotencyStore
from kvcustody.governance.service.inbox.delivery import InboxDelivery
from kvcustody.governance.service.inbox.read_inbox import InboxContents, InboxReader
from kvcustody.governance.service.ingest.ingest import Ingest
from kvcustody.governance.service.ingest.traced_writer import TracedWriter
from kvcustody.governance.service.ingest.worker_claims import WorkerClaims
from kvcustody.governance.service.jobs import JobRunner
from kvcustody.governance.service.live_reads import LiveReads
from kvcustody.governance.service.page_cursor import Cursors
from kvcustody.governance.service.problem_details import ProblemError, not_found
from kvcustody.governance.service.processes.policy_work import PolicyWork
from kvcustody.governance.service.render_protocol import DocumentRenderer, JsonDocuments
from kvcustody.governance.service.row_level_security import has_row_level_security, restrict_to_tenant
from kvcustody.governance.service.schedules.report_scheduler import ReportScheduler
from kvcustody.governance.service.schedules.schedule_book import ScheduleBook
from kvcustody.governance.service.schedules.signed_verdicts import ReportsHere, SignedVerdicts
from kvcustody.governance.service.settings import ServiceSettings
from kvcustody.governance.service.tracing import open_tracing
from kvcustody.migrations.upgrade import upgrade
from kvcustody.policies.document.model import Action
from kvcustody.times import SECOND_US

_log = structlog.get_logger(__name__)
_MINUTE = 60
_MARKED_SECONDS = 1.0
_DATABASE_SECONDS = 5.0
_COVER_SECONDS = 5.0


class Service:
    """An open control plane. Use it as a context manager; `open_service` builds it."""

    requests_of_workers = threading.Lock()  # one after the other: each looks at what is on record first
    _marked: tuple[float, Marked] = float("-inf"), ()  # when it was asked, and what was found

    def __init__(
        self, settings: ServiceSettings, clock: Clock | None, stack: ExitStack, documents: DocumentRenderer
    ) -> None:
        self.settings = settings
        self.documents = documents
        self.changes = 0  # goes up with whatever workers wait for
        self.stopping = threading.Event()  # long answers end when this is set
        self._stack = stack
        folder = settings.state_path
        settings.make_state_folder()
        self.clock = clock = settings.open_clock(clock, stack)
        self.secret = open_secret(folder / "service.key")
        self.engine = _engine(settings, stack)
        self.reader = _engine(settings, stack, read_only=True)
        self.row_walls = has_row_level_security(self.reader)
        self.orders = self._signed_orders()
        if not self.row_walls and dialect_of(self.reader).roles:
            _log.warning("no row-level security behind the queries; run `kvcustody db roles`")
        self.subject_keys = _subject_keys(settings, stack)
        if self.subject_keys is None and has_tags(self.reader):
            _log.warning(
                "the ledger knows people by tags: with `subject_names: clear` those are not found by name"
            )
        self.writer = stack.enter_context(
            TracedWriter(
                self.engine,
                worker=settings.name,
                clock=clock,
                spill_directory=folder / "spill",
                settings=WriterSettings(root_interval_seconds=settings.root_interval_seconds),
                subject_keys=self.subject_keys,
                clear_names=settings.subject_names == "clear",
            )
        )
        self.signer: CheckpointSigner | None = None
        self.signer = self._signer(stack)
        stack.callback(self.writer.record_end)  # behind whatever else it records, and signed
        self.attempts = AttemptsReporter(
            Attempts("service", clock),
            lambda taken: self.submit(events_of("service", taken, self.clock.now_us())),
        )
        stack.callback(self.attempts.close)
        of_tokens = (issuer.name for issuer in settings.issuers)
        self.principals = Principals(self.engine, KeyHasher(), clock, self.record, of_tokens)
        self.sessions = Sessions(
            self.engine,
            self.secret,
            clock,
            seconds=settings.session_minutes * _MINUTE,
            idle_seconds=settings.session_idle_minutes * _MINUTE,
        )
        self.sign_in_links = SignInLinks(clock)
        self.live_reads = LiveReads()
        failures = RateLimiter(settings.failures_per_minute / _MINUTE, settings.failures_per_minute)
        tokens = OidcTokens(settings.issuers, clock)
        by_key = RateLimiter(settings.key_failures_per_minute / _MINUTE, settings.key_failures_per_minute)
        self.authenticator = ServiceAuthenticator(
            self.principals, tokens, self.sessions, failures, by_key, self.attempts.note, clock
        )
        self.tracing = open_tracing(settings, stack)
        self._issuers = RememberedIssuers()
        self.rates = RateLimiter(settings.requests_per_second, settings.requests_burst)
        self.cursors = Cursors(self.secret)
        self.answers = IdempotencyStore(
            self.engine, self.secret, clock, owner=settings.name, hours=settings.answers_hours
        )
        self.answers.free([settings.name])
        self.dead_workers, self.fleet = self._fleet(stack)
        keys = _subject_keys(settings, stack)
        self.ingest = Ingest(
            self.engine,
            self.fleet.flush,
            keys,
            clear_names=settings.subject_names == "clear",
            readers=settings.readers,
            clock=clock,
        )
        stack.callback(self.ingest.close)
        self._open_policies(stack)
        self.figures = stack.enter_context(
            closing(
                FigureKeeper(
                    self.engine,
                    self.reader,
                    clock,
                    seconds=settings.figures_seconds,
                    waited=lambda: self.ingest.is_busy,
                )
            )
        )
        self.verdicts = SignedVerdicts(
            ReportsHere(
                folder / "jobs",
                lambda: [period.key for period in recorded_keys(self.engine)],
                lambda: self.signer is not None,
            )
        )
        self.measuring = stack.enter_context(closing(ServiceMetrics(self)))
        self.jobs = stack.enter_context(
            closing(JobRunner(self.engine, clock, folder / "jobs", owner=settings.name))
        )
        self._open_outward(stack)
        _log.info("service open", service=settings.name, ledger=dialect_of(self.engine).name)

    @cached_property
    def identity(self) -> str:
        """What tells this ledger from every other (`ledger_identity`)."""
        with self.engine.connect() as connection:
            return ledger_identity(connection)

    def _signed_orders(self) -> SignedOrders | None:
        """Whose orders count here, for every connection to the ledger."""
        settings = self.settings
        orders = read_signed_orders(settings.policy_trust, settings.ledger_origin, settings.order_key_path)
        for store in (self.engine, self.reader):
            authenticate(store, orders)
        if orders is not None:
            _log.info("orders are authenticated", why=AUTHENTICATED)
            if not orders.may_sign:
                _log.warning("orders are refused", why=NO_KEY)
        return orders

    def _open_policies(self, stack: ExitStack) -> None:
        """Releases, the process that works on whole policies, and what rests on them."""
        settings = self.settings
        work = PolicyWork(seconds=settings.policy_work_seconds, bytes_max=int(settings.policy_work_bytes_max))
        self.policy_work = stack.enter_context(closing(work))
        self.policies = PolicyReleases(
            self.engine, settings.policy_trust, self.clock, self.writer, self.policy_work.assess
        )
        self.claims = WorkerClaims(self.reader, self.policies.released)

    def _open_outward(self, stack: ExitStack) -> None:
        """What asks workers and tells others elsewhere."""
        settings, clock, folder = self.settings, self.clock, self.settings.state_path
        self.scans = LedgerScans(self.engine, clock, self.writer, self.jobs, self.reading)
        self.exports = Exports(self.policies, self.reading)
        self.sinks = Sinks(
            self.reader, settings.webhooks, folder / "sinks", clock, self.record, self.exports.leaving,
            identity=self.identity,
        )  # fmt: skip
        stack.callback(self.sinks.close)
        self._inbox = InboxReader(settings.certificates, self.policy_work.assess, self.sinks.troubles)
        self.schedules = ScheduleBook(self.engine, clock, self.record, settings)
        self.scheduler = ReportScheduler(self, self.schedules)
        stack.callback(self.scheduler.close)
        self.inbox_delivery = InboxDelivery(settings, folder, lambda: self.inbox().items)
        stack.callback(self.inbox_delivery.close)

    def _fleet(self, stack: ExitStack) -> tuple[DeadWorkers, Fleet]:
        """The register of workers, and who closes those that do not come back."""
        settings, clock = self.settings, self.clock
        dead = DeadWorkers(
            self.engine,
            clock,
            name=settings.name,
            silence_days=settings.worker_silence_days,
            in_doubt=lambda: clock.in_doubt,
            record=self.record,
        )
        stack.callback(dead.close)
        apart_us = round(settings.worker_clock_seconds * SECOND_US)
        return dead, Fleet(self.engine, clock, dead.close_before, apart_us=apart_us)

    def _signer(self, stack: ExitStack) -> CheckpointSigner | None:
        """The signer of this ledger's checkpoints; None where another process signs."""
        settings, path = self.settings, self.settings.signing_key_path
        key = open_signing_key(
            path,
            settings.ledger_origin,
            self.engine,
            self.writer,
            self.clock,
            KeyKind.named(settings.signing_key_kind),
        )
        if key is None:
            return None
        stack.callback(self._end_signer)
        stack.callback(self.writer.flush)
        return self.signing_with(key)

    def signing_with(self, key: SigningKey) -> CheckpointSigner:
        """A signer of this ledger's checkpoints with this key, at work."""
        settings, path = self.settings, self.settings.signing_key_path
        memory = memory_of(path)
        seconds = settings.checkpoint_seconds
        signer = CheckpointSigner(
            self.engine, [key], memory=memory, clock=self.clock, interval_seconds=seconds
        )
        signer.start()
        return signer

    def _end_signer(self) -> None:
        if self.signer is not None:  # another one than at the start, where the key was handed over
            self.signer.close()

    def cover(self) -> None:
        """Seal what is committed, and sign it where this process signs: somebody waits for a proof of it.

        What cannot be is left as it is, and the signer's status says why.
        """
        if self.signer is None:
            self.writer.seal(_COVER_SECONDS)
            return
        with suppress(CustodyError, SQLAlchemyError, OSError):
            self.signer.sign_once()

    def record(self, event: Event) -> None:
        """Make a class A event durable (rule 2).

        Raises `unavailable` where the ledger cannot record, and `conflict` for an order that would not be signed.
        """
        with _recorded():
            self.writer.submit_durable(event)

    def authorize(self, action: Action, caller: Caller, classifications: Iterable[str] = ()) -> None:
        """Let a tenant's own people act on what is the tenant's, by the policy in effect; raises `forbidden`.

        `classifications`: those that the act is about; none: all that the policy has. People of no tenant act by role.
        """
        if caller.tenant is not None:
            with _recorded():
                self.policies.authorize(action, caller.tenant, classifications, caller.roles)

    def export(self, caller: Caller, *, once: bool = False) -> None:
        """Let a tenant's own people take leaves of its log out (`fleet.exports`); raises `forbidden`."""
        with _recorded():
            self.exports.check(caller, once=once)

    def end_record(self, awaited: Awaited) -> None:
        """Return where an event that `writer.begin_durable` queued is durable by now; raises as `record` does."""
        with _recorded():
            self.writer.end_durable(awaited)

    def changed(self) -> None:
        """There is something new for workers that wait."""
        self.changes += 1

    def submit(self, events: Sequence[Event]) -> None:
        """Queue class B events."""
        self.writer.submit(events)

    @contextmanager
    def reading(self, tenant: str | None = None) -> Iterator[Connection]:
        """A connection in one read transaction; with `tenant`, behind the wall of its rows (row_walls)."""
        with self._reading(self.reader) as connection:
            if tenant is not None and self.row_walls:
                restrict_to_tenant(connection, tenant)
            yield connection

    @contextmanager
    def reading_at_rest(self) -> Iterator[Connection]:
        """A connection in one read transaction that may last, and holds no writer up (`private_copy`)."""
        with at_rest(self.reader) as engine, self._reading(engine) as connection:
            yield connection

    @contextmanager
    def _reading(self, engine: Engine) -> Iterator[Connection]:
        with engine.connect() as connection, connection.begin():
            dialect_of(connection).begin_reading(connection)
            yield connection

    def named(self, said: str) -> str:
        """The name of the tenant that somebody calls so. No wall: whose tenants there are is in the system log."""
        with self.reading() as connection:
            return named_tenant(connection, said, self._issuers.known(connection))

    def about(self, said: str) -> str:
        """Whom a question is about, for its record: empty for what names nobody."""
        try:
            return self.named(check_tenant_name(said))
        except (ConfigError, IdentityError):
            return ""

    def tenant_of(self, caller: Caller, action: Permission, said: str | None) -> str | None:
        """The tenant to answer a caller about, as they named it: None for all of them.

        Raises `not-found` where it is not theirs, and `ConfigError` where who sees all says an id of several tenants.
        """
        caller.must(action)
        if said is None or said == caller.tenant:
            return caller.tenant_of(action, said)
        try:
            name = self.named(said)
        except ConfigError:
            if caller.reach(action) is Reach.ALL:
                raise
            raise not_found() from None
        return caller.tenant_of(action, name)

    @property
    def token_issuers(self) -> list[str]:
        """The issuers whose tokens name people here."""
        return [issuer.name for issuer in self.settings.issuers]

    def released(self) -> ReleaseState | None:
        """The policies that were released; None where the settings name no trust."""
        return self.policies.released()

    def absent(self, error: LedgerError) -> ProblemError:
        """What is not there is answered like what is not the caller's."""
        return not_found()

    def names_of(self, tenant: str, subject: str) -> list[str]:
        """Every pseudonym of a subject of a tenant. No wall: who is behind a pseudonym is in no tenant's log."""
        with self.reading() as connection:
            return names_of(connection, tenant, subject, self.subject_keys)

    def work_periods(self) -> dict[str, WorkPeriod]:
        """Which processes were at work, and when. No wall: it is in the system log, and names no tenant."""
        with self.reading() as connection:
            return read_work_periods(connection)

    def marked(self) -> Marked:
        """Which processes replayed or generated what they recorded, as of a second ago. No wall, as `work_periods`."""
        if not self.knows_marked:
            with self.reading() as connection:
                self._marked = time.monotonic(), read_marked(connection)
        return self._marked[1]

    @property
    def knows_marked(self) -> bool:
        """Whether `marked` answers without asking the database."""
        return time.monotonic() - self._marked[0] < _MARKED_SECONDS

    def policies_in_effect(self) -> PoliciesInEffect:
        """Which policies workers run, by their leaves; else what is released. No wall, as `work_periods`."""
        with self.reading() as connection:
            running = read_running_policies(connection)
            enforcement = worker_enforcement(connection)
        return policies_in_effect(running, self.policies.released(), enforcement)

    def inbox(self, effect: PoliciesInEffect | None = None) -> InboxContents:
        """Everything that waits for anybody, the most urgent first. No wall: it is filtered by whom it is for.

        `effect`: what is in effect, where it was read before.
        """
        release, effect = self.policies.released(), effect or self.policies_in_effect()
        with self.reading() as connection:
            return self._inbox.read(connection, self.clock.utc_us(), release=release, effect=effect)

    def ready(self) -> bool:
        """Whether requests can be served now: the ledger admits and the database answers."""
        if self.stopping.is_set() or not self.writer.admitting:
            return False
        try:
            with self.reader.connect() as connection:
                connection.exec_driver_sql("SELECT 1")
        except Exception:
            return False
        return True

    def close(self) -> None:
        """Close in order; a second time changes nothing."""
        self.stopping.set()
        self._stack.close()

    def __enter__(self) -> Service:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def _recorded() -> Iterator[None]:
    """What the ledger refuses to record is not available to whoever asked."""
    try:
        yield
    except UnsignedOrderError as error:
        raise ProblemError("conflict", error.message) from error
    except LedgerError as error:
        _log.error("not recorded, so not done", exc_info=True)
        raise ProblemError("unavailable", "the ledger cannot record", headers={"Retry-After": "2"}) from error


def open_service(
    settings: ServiceSettings, *, clock: Clock | None = None, documents: DocumentRenderer | None = None
) -> Service:
    """Open a control plane: migrate its ledger, then everything else. Raises a `CustodyError` that says what failed.

    `documents` renders reports and certificates for people; without it there is JSON alone.
    """
    with ExitStack() as stack:
        service = Service(settings, clock, stack, documents or JsonDocuments())
        service._stack = stack.pop_all()
        return service


def _engine(settings: ServiceSettings, stack: ExitStack, *, read_only: bool = False) -> Engine:
    engine = open_store(
        settings.database_url,
        read_only=read_only,
        timeout_seconds=_DATABASE_SECONDS,
        statement_seconds=settings.statement_seconds,
    )
    stack.callback(engine.dispose)
    if not read_only:
        upgrade(engine)
    return engine


def _subject_keys(settings: ServiceSettings, stack: ExitStack) -> SubjectKeys | None:
    """The store of subject keys, opened anew: each thread that writes names has keys in memory of its own."""
    keys = settings.open_subject_keys()
    if keys is not None:
        stack.callback(keys.close)
    return keys
