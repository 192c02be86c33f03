"""The control plane's parts, opened in order and closed in reverse, which every API operation uses.

1. Nothing is answered before the ledger's writer runs, and the writer ends after the last request has.
2. `record` returns once a class A event is durable, or raises: what it guards then does not happen.
3. Reads run on connections that cannot write.
4. However it comes to close, its own orderly end is the last that it records, and is signed where it signs.
5. One that does not serve works for a command, beside a server that may be running: under a name and with a spill of
   its own. It begins nothing by itself: no schedule, delivery, checkpoint or closing of silent workers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from kvcustody.audit.evidence.processes.marked_processes import Marked
from kvcustody.audit.evidence.processes.orders import AUTHENTICATED
from kvcustody.audit.evidence.processes.remembered_lives import RememberedLives
from kvcustody.audit.evidence.processes.work_periods import WorkPeriod
from kvcustody.audit.evidence.query.events import EventFilter
from kvcustody.audit.evidence.query.issuers import RememberedIssuers, named_tenant
from kvcustody.audit.evidence.subjects.subject_key_store import SubjectKeys
from kvcustody.audit.evidence.subjects.subject_table import has_tags
from kvcustody.audit.kinds import ErasureRequested, Event
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.database.open_changes import SchemaChangedError, guard_writes
from kvcustody.audit.store.database.private_copy import at_rest
from kvcustody.audit.store.database.signed_orders import NO_KEY, SignedOrders, authenticate
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner, SignerStatus
from kvcustody.audit.tlog.ledger_identity import ledger_identity
from kvcustody.audit.tlog.signed_note import KeyKind
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.audit.write.event_writer import Awaited, WriterSettings, WriterStatus
from kvcustody.clock import Clock
from kvcustody.errors import ConfigError, CustodyError, IdentityError, LedgerError, UnsignedOrderError
from kvcustody.governance.credentials.api_key import KeyHasher
from kvcustody.governance.credentials.service_secret import open_secret
from kvcustody.governance.identity.principal import check_tenant_name
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.local_administration import LOCAL_SPILL, local_turn, local_writer
from kvcustody.governance.service.access.principals import Principals
from kvcustody.governance.service.access.rate_limiter import RateLimiter
from kvcustody.governance.service.access.roles import Permission, Reach
from kvcustody.governance.service.held.held_questions import HeldQuestions
from kvcustody.governance.service.idempotency import IdempotencyStore
from kvcustody.governance.service.ingest.traced_writer import TracedWriter
from kvcustody.governance.service.live_reads import LiveReads
from kvcustody.governance.service.operations.desk import LedgerReads
from kvcustody.governance.service.page_cursor import Cursors
from kvcustody.governance.service.problem_details import ProblemError, not_found
from kvcustody.governance.service.render_protocol import DocumentRenderer, JsonDocuments
from kvcustody.governance.service.row_level_security import has_row_level_security, restrict_to_tenant
from kvcustody.governance.service.settings import ServiceSettings
from kvcustody.governance.service.tracing import open_tracing
from kvcustody.logger import get_logger
from kvcustody.migrations.upgrade import ready_schema
from kvcustody.times import SECOND_US

if TYPE_CHECKING:
    from kvcustody.governance.erasure.selector import Selector
    from kvcustody.governance.observability.attempts import AttemptsReporter
    from kvcustody.governance.release.policies_in_effect import PoliciesInEffect
    from kvcustody.governance.release.replay_records import ReleaseState
    from kvcustody.governance.service.access.authenticator import ServiceAuthenticator
    from kvcustody.governance.service.access.sessions import Sessions
    from kvcustody.governance.service.access.sign_in_links import SignInLinks
    from kvcustody.governance.service.epochs.epoch_book import EpochBook, EpochTurns
    from kvcustody.governance.service.epochs.scopes_in_effect import ScopesInEffect
    from kvcustody.governance.service.fleet.dead_workers import DeadWorkers
    from kvcustody.governance.service.fleet.exports import Exports
    from kvcustody.governance.service.fleet.figure_keeper import FigureKeeper
    from kvcustody.governance.service.fleet.ledger_scan import LedgerScans
    from kvcustody.governance.service.fleet.metrics_samples import ServiceMetrics
    from kvcustody.governance.service.fleet.policy_releases import PolicyReleases
    from kvcustody.governance.service.fleet.webhooks import Sinks
    from kvcustody.governance.service.fleet.workers import Fleet
    from kvcustody.governance.service.health.verdict import ServiceVerdict
    from kvcustody.governance.service.held.what_changed import OrdersSeen
    from kvcustody.governance.service.held.worker_orders import WorkerOrders
    from kvcustody.governance.service.inbox.delivery import InboxDelivery
    from kvcustody.governance.service.inbox.item import InboxItem
    from kvcustody.governance.service.inbox.read_inbox import InboxContents, InboxReader
    from kvcustody.governance.service.ingest.ingest import Ingest
    from kvcustody.governance.service.ingest.worker_claims import WorkerClaims
    from kvcustody.governance.service.jobs import JobRunner
    from kvcustody.governance.service.processes.policy_work import PolicyWork
    from kvcustody.governance.service.schedules.report_scheduler import ReportScheduler
    from kvcustody.governance.service.schedules.schedule_book import ScheduleBook
    from kvcustody.governance.service.schedules.signed_verdicts import SignedVerdicts
    from kvcustody.governance.service.tracing import Tracing
    from kvcustody.policies.document.model import Action

_log = get_logger(__name__)
_MINUTE = 60
_MARKED_SECONDS = 1.0
_DATABASE_SECONDS = 5.0
_PROBE_SECONDS = 2.0  # that the verdict's question to the database may take
_SIGNED_SECONDS, _SIGNED_INTERVALS = 60.0, 10  # that a checkpoint may wait for its signature
_COVER_SECONDS = 5.0
_CEILING_SECONDS = 5.0  # that a ceiling is told before policies are read again
_PARTS = (
    "signer", "attempts", "principals", "sessions", "sign_in_links", "authenticator", "tracing", "rates", "answers",
    "dead_workers", "fleet", "ingest", "verdict", "policy_work", "policies", "epochs", "epoch_turns", "claims",
    "figures", "verdicts", "measuring", "jobs", "scans", "exports", "sinks", "schedules", "scheduler", "inbox_delivery",
)  # fmt: skip


class Service(LedgerReads):
    """An open control plane. Use it as a context manager; `open_service` and `open_local_service` build it.

    A part opens when it is first used. Whoever serves opens every part at the start (`open_parts`).
    """

    requests_of_workers = threading.Lock()  # one after the other: each looks at what is on record first
    _marked: tuple[float, Marked] = float("-inf"), ()  # when it was asked, and what was found

    def __init__(
        self,
        settings: ServiceSettings,
        clock: Clock | None,
        stack: ExitStack,
        documents: DocumentRenderer,
        *,
        spill: str = "spill",
        serves: bool = True,
    ) -> None:
        """`spill`: the writer's folder. `serves`: see rule 5."""
        self.settings = settings
        self.documents = documents
        self.held = HeldQuestions(self._read_orders_seen)
        self.stopping = self.held.stopping  # long answers end when this is set
        self.lives = RememberedLives()
        stack.callback(self.held.close)
        self._stack = stack
        self._serves = serves
        self._opening_signer = threading.Lock()
        self._folder = folder = settings.state_path
        settings.make_state_folder()
        self.clock = clock = settings.open_clock(clock, stack)
        self.secret = open_secret(folder / "service.key")
        self.engine = _engine(settings, stack)
        self.reader = _engine(settings, stack, read_only=True)
        self.row_walls = has_row_level_security(self.reader)
        self.orders = self._signed_orders()
        if not self.row_walls and dialect_of(self.reader).roles:
            _log.warning("row-level security is not set up; run `kvcustody db roles`")
        self.writer = stack.enter_context(
            TracedWriter(
                self.engine,
                worker=settings.name,
                clock=clock,
                spill_directory=folder / spill,
                settings=WriterSettings(root_interval_seconds=settings.root_interval_seconds),
                subject_keys=self.subject_keys,
                clear_names=settings.subject_names == "clear",
            )
        )
        stack.callback(self._end_signer)
        stack.callback(self.writer.flush)
        stack.callback(self.writer.record_end)  # behind whatever else it records, and signed
        self.live_reads = LiveReads()
        self.cursors = Cursors(self.secret)
        self._issuers = RememberedIssuers()
        self._shortest_ceiling: tuple[float, int | None] | None = None

    def open_parts(self) -> None:
        """Open every part in the order of their dependencies."""
        for name in _PARTS:
            getattr(self, name)
        _log.info("service open", service=self.settings.name, ledger=dialect_of(self.engine).name)

    @cached_property
    def identity(self) -> str:
        """The unique identity of this ledger (`ledger_identity`)."""
        with self.engine.connect() as connection:
            return ledger_identity(connection)

    @cached_property
    def subject_keys(self) -> SubjectKeys | None:
        """The store of subject keys; None where names are in clear, and for a command without one."""
        keys = self._open_subject_keys()
        if self.settings.subject_names == "clear" and keys is None and has_tags(self.reader):
            _log.warning("the ledger names people by tags: with `subject_names: clear` they cannot be found by name")
        return keys

    def _open_subject_keys(self) -> SubjectKeys | None:
        """The store, opened anew: each thread that writes names has keys in memory of its own."""
        keys = self.settings.open_subject_keys()
        if keys is not None:
            self._stack.callback(keys.close)
        return keys

    @cached_property
    def signer(self) -> CheckpointSigner | None:
        """The signer of this ledger's checkpoints; None where another process signs."""
        from kvcustody.governance.keys.checkpoint_signing_key import open_signing_key

        settings = self.settings
        with self._opening_signer:
            if "signer" in vars(self):  # another thread was first
                return self.signer
            key = open_signing_key(
                settings.signing_key_path,
                settings.ledger_origin,
                self.engine,
                self.writer,
                self.clock,
                KeyKind.named(settings.signing_key_kind),
            )
            self.signer = made = None if key is None else self.signing_with(key)
            return made

    def signing_with(self, key: SigningKey) -> CheckpointSigner:
        """Return a signer of this ledger's checkpoints with this key; it works where this process serves."""
        from kvcustody.governance.keys.checkpoint_signing_key import memory_of

        settings = self.settings
        signer = CheckpointSigner(
            self.engine,
            [key],
            memory=memory_of(settings.signing_key_path),
            clock=self.clock,
            interval_seconds=settings.checkpoint_seconds,
        )
        if self._serves:
            signer.start()
        return signer

    def _end_signer(self) -> None:
        signer = vars(self).get("signer")  # another one than at the start, where the key was handed over
        if signer is not None:
            signer.close()

    @cached_property
    def attempts(self) -> AttemptsReporter:
        """The refused credentials, counted and recorded."""
        from kvcustody.governance.observability.attempts import Attempts, AttemptsReporter, events_of

        made = AttemptsReporter(
            Attempts("service", self.clock),
            lambda taken: self.submit(events_of("service", taken, self.clock.now_us())),
        )
        self._stack.callback(made.close)
        return made

    @cached_property
    def _access_engine(self) -> Engine:
        """For whoever looks credentials up: on a server, with connections that no other work takes."""
        if dialect_of(self.engine).one_writer:
            return self.engine
        engine = _engine(self.settings, self._stack)
        authenticate(engine, self.orders)
        return engine

    @cached_property
    def principals(self) -> Principals:
        """The book of principals and their keys."""
        of_tokens = (issuer.name for issuer in self.settings.issuers)
        return Principals(self._access_engine, KeyHasher(), self.clock, self.record, of_tokens)

    @cached_property
    def sessions(self) -> Sessions:
        """People's sessions."""
        from kvcustody.governance.service.access.sessions import Sessions

        return Sessions(
            self._access_engine,
            self.secret,
            self.clock,
            seconds=self.settings.session_minutes * _MINUTE,
            idle_seconds=self.settings.session_idle_minutes * _MINUTE,
        )

    @cached_property
    def sign_in_links(self) -> SignInLinks:
        """One-time sign-in links."""
        from kvcustody.governance.service.access.sign_in_links import SignInLinks

        return SignInLinks(self.clock)

    @cached_property
    def authenticator(self) -> ServiceAuthenticator:
        """The authenticator of callers."""
        from kvcustody.governance.service.access.authenticator import ServiceAuthenticator
        from kvcustody.governance.service.access.oidc_token import OidcTokens

        settings = self.settings
        failures = RateLimiter(settings.failures_per_minute / _MINUTE, settings.failures_per_minute)
        by_key = RateLimiter(settings.key_failures_per_minute / _MINUTE, settings.key_failures_per_minute)
        tokens = OidcTokens(settings.issuers, self.clock)
        note_attempt = self.attempts.note
        return ServiceAuthenticator(
            self.principals,
            tokens,
            self.sessions,
            failures,
            by_key,
            note_attempt,
            self.clock,
            lambda: None if (seen := self.orders_seen_lately()) is None else seen.credentials,
        )

    @cached_property
    def tracing(self) -> Tracing | None:
        """Spans of requests; None where the settings ask for none."""
        return open_tracing(self.settings, self._stack)

    @cached_property
    def rates(self) -> RateLimiter:
        """The rate limits of principals."""
        return RateLimiter(self.settings.requests_per_second, self.settings.requests_burst)

    @cached_property
    def answers(self) -> IdempotencyStore:
        """Stored answers for repeated requests. Keys that a dead process held are free again."""
        settings = self.settings
        made = IdempotencyStore(self.engine, self.secret, self.clock, owner=settings.name, hours=settings.answers_hours)
        made.free([settings.name])
        return made

    @cached_property
    def dead_workers(self) -> DeadWorkers:
        """Closes processes that will not return."""
        from kvcustody.governance.service.fleet.dead_workers import DeadWorkers

        dead = DeadWorkers(
            self.engine,
            self.clock,
            name=self.settings.name,
            silence_days=self.settings.worker_silence_days if self._serves else 0,
            in_doubt=lambda: self.clock.in_doubt,
            record=self.record,
            at_once=not self._serves,
        )
        self._stack.callback(dead.close)
        return dead

    @cached_property
    def fleet(self) -> Fleet:
        """The register of workers."""
        from kvcustody.governance.service.fleet.workers import Fleet

        apart_us = round(self.settings.worker_clock_seconds * SECOND_US)
        return Fleet(self.engine, self.clock, self._close_before, self.lives, apart_us=apart_us)

    def _close_before(self, worker: str, incarnation: str) -> None:
        self.dead_workers.close_before(worker, incarnation)

    @cached_property
    def ingest(self) -> Ingest:
        """Takes workers' leaves in."""
        from kvcustody.governance.service.ingest.ingest import Ingest

        settings = self.settings
        ingest = Ingest(
            self.engine,
            self.fleet.flush,
            self._open_subject_keys(),
            clear_names=settings.subject_names == "clear",
            readers=settings.readers,
            clock=self.clock,
        )
        self._stack.callback(ingest.close)
        return ingest

    @cached_property
    def policy_work(self) -> PolicyWork:
        """The process that works on whole policies."""
        from kvcustody.governance.service.processes.policy_work import PolicyWork

        settings = self.settings
        work = PolicyWork(seconds=settings.policy_work_seconds, bytes_max=int(settings.policy_work_bytes_max))
        return self._stack.enter_context(closing(work))

    @cached_property
    def policies(self) -> PolicyReleases:
        """The release of policies."""
        from kvcustody.governance.service.fleet.policy_releases import PolicyReleases

        return PolicyReleases(self.engine, self.settings.policy_trust, self.clock, self.writer, self.policy_work.assess)

    @cached_property
    def epochs(self) -> EpochBook:
        """The erase epochs that erasures raised."""
        from kvcustody.governance.service.epochs.epoch_book import EpochBook

        return EpochBook(
            self.engine,
            self.clock,
            self.secret.key("erase-epochs"),
            ceiling_us=self._longest_ceiling_us,
            epoch_minutes=self.settings.epoch_minutes,
            namespace_days=self.settings.namespace_days,
        )

    @cached_property
    def name_scopes(self) -> ScopesInEffect:
        """The scopes of doors' names."""
        from kvcustody.governance.service.epochs.scopes_in_effect import ScopesInEffect

        return ScopesInEffect(self.policies_in_effect)

    @cached_property
    def epoch_turns(self) -> EpochTurns:
        """Raises the epochs of shared names when they are due."""
        from kvcustody.governance.service.epochs.epoch_book import EpochTurns

        return self._stack.enter_context(closing(EpochTurns(self.epochs, self.clock, self._record_epochs)))

    def _longest_ceiling_us(self) -> int | None:
        """The longest that the policies in effect let a block exist; None where one's document is unknown."""
        effect = self.policies_in_effect()
        if effect.unsaid or any(one.policy is None for one in effect.policies):
            return None
        return max((one.policy.ceiling_us for one in effect.policies if one.policy is not None), default=0)

    def shortest_ceiling_us(self) -> int | None:
        """The shortest lifetime ceiling under the policies in effect; None where one is unknown or none applies."""
        now = time.monotonic()
        if self._shortest_ceiling is None or now - self._shortest_ceiling[0] > _CEILING_SECONDS:
            effect = self.policies_in_effect()
            known = [one.policy.shortest_ceiling_us for one in effect.policies if one.policy is not None]
            is_unknown = bool(effect.unsaid) or len(known) < len(effect.policies)
            self._shortest_ceiling = now, None if is_unknown else min(known, default=None)
        return self._shortest_ceiling[1]

    def record_erasure(self, asked: ErasureRequested, selector: Selector) -> None:
        """Record an erasure after ending the routers' names that it narrows; raises as `record`."""
        deadline_us = asked.deadline_us + self.writer.offset_us
        with _recorded():
            self._record_epochs(self.epochs.raise_for(selector, asked.erasure, deadline_us, self.clock.now_us()))
        self.record(asked)
        self.changed()
        if self._serves:
            self.epoch_turns.wake()

    def raise_above(self, known: int | None) -> None:
        """End every router's name, because raises up to `known` were lost in a restore.

        Raises as `EpochBook.raise_above`.
        """
        made = self.epochs.raise_above(known, self.clock.now_us())
        if made:
            self._record_epochs(made)

    def _record_epochs(self, raised: Sequence[Event]) -> None:
        self.submit(raised)
        self.changed()

    @cached_property
    def worker_orders(self) -> WorkerOrders:
        """The orders of workers."""
        from kvcustody.governance.service.held.worker_orders import WorkerOrders

        return WorkerOrders(self.reading, self.lives, self.subject_keys)

    def orders_seen_lately(self) -> OrdersSeen | None:
        """What workers wait for, as read less than three seconds ago; None where nobody waits, or the read failed."""
        return self.held.seen_lately()

    def _read_orders_seen(self) -> OrdersSeen:
        from kvcustody.governance.service.held.what_changed import read_orders_seen

        with self.reading() as connection:
            return read_orders_seen(connection)

    @cached_property
    def verdict(self) -> ServiceVerdict:
        """The verdict on the service."""
        from kvcustody.governance.service.health.database_probe import DatabaseProbe
        from kvcustody.governance.service.health.verdict import ServiceVerdict, read_ledger

        settings = self.settings
        engine = open_store(
            settings.database_url,
            read_only=True,
            timeout_seconds=_PROBE_SECONDS,
            statement_seconds=_PROBE_SECONDS,
        )
        probe = DatabaseProbe(engine, lambda connection: read_ledger(connection, self.clock.utc_us()))
        return ServiceVerdict(
            _Observed(self),
            self._stack.enter_context(closing(probe)),
            root_interval_seconds=settings.root_interval_seconds,
            signed_within_seconds=max(_SIGNED_SECONDS, _SIGNED_INTERVALS * settings.checkpoint_seconds),
        )

    @cached_property
    def claims(self) -> WorkerClaims:
        """The checks of workers' claims."""
        from kvcustody.governance.service.ingest.worker_claims import WorkerClaims

        return WorkerClaims(self.reader, self.policies.released)

    @cached_property
    def figures(self) -> FigureKeeper:
        """Keeps the ledger's figures current."""
        from kvcustody.governance.service.fleet.figure_keeper import FigureKeeper

        keeper = FigureKeeper(
            self.engine,
            self.reader,
            self.clock,
            seconds=self.settings.figures_seconds,
            waited=lambda: self.ingest.is_busy,
        )
        return self._stack.enter_context(closing(keeper))

    @cached_property
    def verdicts(self) -> SignedVerdicts:
        """Verdicts of reports, read from the reports."""
        from kvcustody.governance.keys.checkpoint_signing_key import recorded_keys
        from kvcustody.governance.service.schedules.signed_verdicts import ReportsHere, SignedVerdicts

        signs = (lambda: self.signer is not None) if self._serves else self.settings.signing_key_path.exists
        return SignedVerdicts(
            ReportsHere(self._folder / "jobs", lambda: [period.key for period in recorded_keys(self.engine)], signs)
        )

    @cached_property
    def measuring(self) -> ServiceMetrics:
        """Collects the samples of metrics."""
        from kvcustody.governance.service.fleet.metrics_samples import ServiceMetrics

        return self._stack.enter_context(closing(ServiceMetrics(self)))

    @cached_property
    def jobs(self) -> JobRunner:
        """The long-running jobs."""
        from kvcustody.governance.service.jobs import JobRunner

        made = JobRunner(self.engine, self.clock, self._folder / "jobs", owner=self.settings.name)
        return self._stack.enter_context(closing(made))

    @cached_property
    def scans(self) -> LedgerScans:
        """The scans of the ledger, and scan orders for workers."""
        from kvcustody.governance.service.fleet.ledger_scan import LedgerScans

        return LedgerScans(self.engine, self.clock, self.writer, self.jobs, self.reading)

    @cached_property
    def exports(self) -> Exports:
        """The decisions about exports."""
        from kvcustody.governance.service.fleet.exports import Exports

        return Exports(self.policies, self.reading)

    @cached_property
    def sinks(self) -> Sinks:
        """The webhooks that get the ledger."""
        from kvcustody.governance.service.fleet.webhooks import Sinks

        sinks = Sinks(
            self.reader,
            self.settings.webhooks,
            self._folder / "sinks",
            self.clock,
            self.record,
            self.exports.leaving,
            identity=self.identity,
            delivers=self._serves,
        )
        self._stack.callback(sinks.close)
        return sinks

    @cached_property
    def _inbox(self) -> InboxReader:
        from kvcustody.governance.service.inbox.read_inbox import InboxReader

        verdict = self.verdict.troubles if self._serves else tuple
        return InboxReader(self.settings.certificates, self.policy_work.assess, self.sinks.troubles, verdict)

    @cached_property
    def schedules(self) -> ScheduleBook:
        """The schedules of reports."""
        from kvcustody.governance.service.schedules.schedule_book import ScheduleBook

        return ScheduleBook(self.engine, self.clock, self.record, self.settings)

    @cached_property
    def scheduler(self) -> ReportScheduler:
        """Makes scheduled reports."""
        from kvcustody.governance.service.schedules.report_scheduler import ReportScheduler

        made = ReportScheduler(self, self.schedules)
        self._stack.callback(made.close)
        return made

    @cached_property
    def inbox_delivery(self) -> InboxDelivery:
        """Delivers open tasks outside the console."""
        from kvcustody.governance.service.inbox.delivery import InboxDelivery

        made = InboxDelivery(self.settings, self._folder, lambda: self.inbox().items)
        self._stack.callback(made.close)
        return made

    def _signed_orders(self) -> SignedOrders | None:
        """Whose orders count here, for every connection to the ledger."""
        settings, orders = self.settings, None
        if settings.policy_trust is not None:
            from kvcustody.governance.release.order_signing import read_signed_orders

            orders = read_signed_orders(settings.policy_trust, settings.ledger_origin, settings.order_key_path)
        for store in (self.engine, self.reader):
            authenticate(store, orders)
        if orders is not None:
            _log.info("orders are authenticated", why=AUTHENTICATED)
            if not orders.may_sign:
                _log.warning("orders are refused", why=NO_KEY)
        return orders

    def cover(self) -> None:
        """Seal committed leaves, and sign where this process signs, because somebody waits for a proof.

        What cannot be is left as it is, and the signer's status says why.
        """
        if self.signer is None:
            self.writer.seal(_COVER_SECONDS)
            return
        with suppress(CustodyError, SQLAlchemyError, OSError):
            self.signer.sign_once()

    def seal_soon(self) -> None:
        """Start sealing and signing committed leaves without waiting."""
        self.writer.seal_soon()

    def record(self, event: Event) -> None:
        """Make a class A event durable (rule 2).

        Raises `unavailable` where the ledger cannot record, and `conflict` for an order that would not be signed.
        """
        with _recorded():
            self.writer.submit_durable(event)

    def authorize(self, action: Action, caller: Caller, classifications: Iterable[str] = ()) -> None:
        """Let a tenant's own people act on the tenant's data under the policy in effect; raises `forbidden`.

        `classifications`: those that the act is about; none: all that the policy has. People of no tenant act by role.
        """
        if caller.tenant is not None:
            with _recorded():
                self.policies.authorize(action, caller.tenant, classifications, caller.roles)

    def export(self, caller: Caller, *, once: bool = False) -> None:
        """Let a tenant's own people export leaves of its log (`fleet.exports`); raises `forbidden`."""
        with _recorded():
            self.exports.check(caller, once=once)

    def end_record(self, awaited: Awaited) -> None:
        """Return when an event that `writer.begin_durable` queued is durable; raises as `record`."""
        with _recorded():
            self.writer.end_durable(awaited)

    def changed(self) -> None:
        """Note that there is news for waiting workers."""
        self.held.changed()

    def submit(self, events: Sequence[Event]) -> None:
        """Queue class B events."""
        self.writer.submit(events)

    @contextmanager
    def reading(self, tenant: str | None = None) -> Iterator[Connection]:
        """Return a connection in one read transaction; with `tenant`, under row-level security."""
        with self._reading(self.reader) as connection:
            if tenant is not None and self.row_walls:
                restrict_to_tenant(connection, tenant)
            yield connection

    def reading_for_long(self, tenant: str | None = None) -> AbstractContextManager[Connection]:
        """Return a connection as `reading`; `statement_seconds` limits one read, because no request copies the
        ledger.
        """
        return self.reading(tenant)

    @contextmanager
    def reading_at_rest(self) -> Iterator[Connection]:
        """Return a connection in one long read transaction that delays no writer (`private_copy`)."""
        with at_rest(self.reader) as engine, self._reading(engine) as connection:
            yield connection

    @contextmanager
    def _reading(self, engine: Engine) -> Iterator[Connection]:
        with engine.connect() as connection, connection.begin():
            dialect_of(connection).begin_reading(connection)
            yield connection

    def named(self, said: str) -> str:
        """Return the unambiguous name of a tenant. No row-level security: tenants are listed in the system log."""
        with self.reading() as connection:
            return named_tenant(connection, said, self._issuers.known(connection))

    def about(self, said: str) -> str:
        """Return whom a question is about, for its record; empty where it names nobody."""
        try:
            return self.named(check_tenant_name(said))
        except (ConfigError, IdentityError):
            return ""

    def tenant_of(self, caller: Caller, action: Permission, tenant_text: str | None) -> str | None:
        """Return the tenant to answer a caller about, as they named it: None for all.

        Raises `not-found` where it is not theirs, and `ConfigError` where who sees all says an id of several tenants.
        """
        caller.must(action)
        if tenant_text is None or tenant_text == caller.tenant:
            return caller.tenant_of(action, tenant_text)
        try:
            name = self.named(tenant_text)
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
        """The released policies; None where the settings name no trust configuration."""
        return self.policies.released()

    def absent(self, error: LedgerError) -> ProblemError:
        """Return the refusal for absent things, equal to the one for others' things."""
        return not_found()

    def check_can_name(self) -> None:
        """Raise `ConfigError` for an act about a person where the ledger seals names and has no store of their keys."""
        if self.subject_keys is None and self.settings.subject_names != "clear":
            raise ConfigError(
                "--subject-keys: there is no store of subject keys beside the ledger; name it, or give "
                "`--subject-names clear` where workers keep names in clear"
            )

    def check_said(self, connection: Connection, wanted: EventFilter) -> None:
        """Do nothing: a caller with a tenant may not learn whether the ledger knows a name."""

    def work_periods(self) -> dict[str, WorkPeriod]:
        """Return which processes ran, and when. No row-level security: processes are in the system log."""
        with self.reading() as connection:
            return self.lives.all(connection).periods

    def marked(self) -> Marked:
        """Return processes that replayed or generated their records, up to a second old. No row-level security, as
        `work_periods`.
        """
        if not self.knows_marked:
            with self.reading() as connection:
                self._marked = time.monotonic(), self.lives.marked(connection)
        return self._marked[1]

    @property
    def knows_marked(self) -> bool:
        """Whether `marked` answers without asking the database."""
        return time.monotonic() - self._marked[0] < _MARKED_SECONDS

    def inbox(self, effect: PoliciesInEffect | None = None) -> InboxContents:
        """Return everybody's open tasks, most urgent first. No row-level security: they are filtered by recipient.

        `effect`: what is in effect, where it was read before.
        """
        release, effect = self.policies.released(), effect or self.policies_in_effect()
        with self.reading() as connection:
            return self._inbox.read(connection, self.clock.utc_us(), release=release, effect=effect)

    def inbox_of(self, caller: Caller) -> list[InboxItem]:
        """Return the open tasks that this person can do, most urgent first."""
        return [item for item in self.inbox().items if item.is_for(caller)]

    def ready(self) -> bool:
        """Whether requests can be served now; answers within two seconds, whatever the database does."""
        return not self.stopping.is_set() and self.verdict.is_ready()

    def close(self) -> None:
        """Close the parts in order; a second call changes nothing."""
        self.stopping.set()
        self._stack.close()

    def __enter__(self) -> Service:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Observed:
    """What a service's own parts say, for its verdict."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def writer_status(self) -> WriterStatus:
        return self._service.writer.status()

    def batch_refusal(self) -> str:
        return self._service.ingest.refusal

    def signer_status(self) -> SignerStatus | None:
        signer = self._service.signer
        return None if signer is None or not signer.at_work else signer.status()

    def clock_in_doubt(self) -> bool:
        return self._service.clock.in_doubt

    def sink_troubles(self) -> list[str]:
        return [f"sink {name}: {trouble.text}" for name, trouble in self._service.sinks.troubles()]


@contextmanager
def _recorded() -> Iterator[None]:
    """What the ledger refuses to record is not available to whoever asked."""
    try:
        yield
    except UnsignedOrderError as error:
        raise ProblemError("conflict", error.message) from error
    except SchemaChangedError:
        raise
    except LedgerError as error:
        _log.error("not done because it could not be recorded", exc_info=True)
        raise ProblemError("unavailable", "the ledger cannot record", headers={"Retry-After": "2"}) from error


def open_service(
    settings: ServiceSettings, *, clock: Clock | None = None, documents: DocumentRenderer | None = None
) -> Service:
    """Open a control plane: migrate its ledger, then open everything else. Raises a `CustodyError` that says what
    failed.

    `documents` renders reports and certificates for people; without it there is JSON alone.
    """
    with ExitStack() as stack:
        service = Service(settings, clock, stack, documents or JsonDocuments())
        service.open_parts()
        service._stack = stack.pop_all()
        return service


def open_local_service(settings: ServiceSettings, *, documents: DocumentRenderer | None = None) -> Service:
    """Open the parts that a command on the ledger's files needs (rule 5); arguments and errors as `open_service`."""
    own = settings.of_command().model_copy(
        update={"name": local_writer(settings), "requests_per_second": 1e6, "requests_burst": 1_000_000}
    )
    with ExitStack() as stack:
        stack.enter_context(local_turn(settings))
        service = Service(own, None, stack, documents or JsonDocuments(), spill=LOCAL_SPILL, serves=False)
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
        ready_schema(engine, migrate=settings.migrate)
        guard_writes(engine)
    return engine
