"""Builds the middleware's parts from this process's settings."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from sqlalchemy.exc import SQLAlchemyError

from kvcustody.audit.store.database.engine import check_store, ledger_error, open_store
from kvcustody.audit.write.event_writer import EventWriter
from kvcustody.audit.write.record_operator_act import recorder
from kvcustody.clock import MICROSECONDS, Clock
from kvcustody.deadline_clock import DeadlineClock
from kvcustody.errors import ConfigError, LedgerError
from kvcustody.governance.control_plane.connection import ControlPlaneConnection
from kvcustody.governance.control_plane.epoch_feed import EpochFeed
from kvcustody.governance.control_plane.opening import connect
from kvcustody.governance.credentials.api_key_file import read_keys
from kvcustody.governance.credentials.scope_token import ScopeTokens
from kvcustody.governance.credentials.scope_token_secret import open_scope_key
from kvcustody.governance.credentials.watched_file import WatchedFile
from kvcustody.governance.edge.current_namespaces import EpochsSource
from kvcustody.governance.edge.custody_lease import lease_seconds
from kvcustody.governance.edge.windowed_token import WindowedTokens
from kvcustody.governance.observability.attempts import Attempted, Attempts, AttemptsReporter, events_of
from kvcustody.governance.settings import Settings
from kvcustody.integrations.identity.authenticators import read_door_keys
from kvcustody.integrations.identity.identity_document import IdentityDocument, load_identity
from kvcustody.integrations.identity.request_gate import RequestGate
from kvcustody.integrations.identity.routes import VLLM_SERVER, EngineServer
from kvcustody.logger import get_logger
from kvcustody.policies.document.model import Policy
from kvcustody.times import SECOND_US

_PLACE = "door"
_LOG = get_logger("kvcustody.identity")


def open_request_gate(
    settings: Settings,
    clock: Clock | None = None,
    *,
    server: EngineServer = VLLM_SERVER,
    stack: ExitStack | None = None,
) -> RequestGate:
    """Return the gate for an API server of this kind.

    Raises:
        ConfigError: a setting or file is wrong.
        KeyringError: the keyring cannot be read.

    Behind a control plane it follows erase epochs until `stack` is closed, or the process ends.
    """
    document = open_identity(settings)
    clock = _process_clock(settings, clock)
    epochs = _follow_epochs(settings, clock, stack) if settings.control_plane else None
    with open_scope_key(settings.scope_token_key_path) as secret:
        return RequestGate(
            document,
            settings.identity_path.parent,
            secret,
            clock,
            token_seconds=settings.scope_token_seconds,
            server=server,
            namespace_days=settings.namespace_days,
            epochs=epochs,
            worker=settings.worker_name,
        )


def _follow_epochs(settings: Settings, clock: Clock, stack: ExitStack | None) -> EpochsSource:
    """Follow the epochs that the worker's own process follows, because a server and its engine may be two processes.

    It acknowledges nothing: what the worker acts by, the worker says.
    """
    if stack is None:
        stack = ExitStack()
        atexit.register(stack.close)
    connection = connect(settings, stack)
    lease = lease_seconds(settings.custody_lease_seconds, erased_within_us=0)
    feed = EpochFeed(connection, clock, lease_seconds=lease, acknowledges=False)
    stack.callback(feed.stop)
    feed.start()
    return feed.known


def open_identity(settings: Settings) -> IdentityDocument:
    """Return the settings' identity document.

    Raises:
        ConfigError: there is none; the message names the setting.
    """
    if not settings.identity_path.exists():
        raise ConfigError(
            f"identity document `{settings.identity_path}`: does not exist; the setting `identity_path` names "
            "it (docs/how-to/operate/set-up-identity.md)",
            path=settings.identity_path,
        )
    return load_identity(settings.identity_path)


def check_issuers(settings: Settings, listed: tuple[str, ...]) -> None:
    """Raise `ConfigError` where the door vouches for several issuers' tenants and the policy lists none.

    Else the first request would decide whose the bare ids are. Where the document is not on this machine, the
    administrator of the door has to see to it.
    """
    try:
        document = load_identity(settings.identity_path)
    except ConfigError:
        return
    issuers = {entry.called for entry in document.issuers}
    if document.api_keys is not None:
        with suppress(ConfigError):
            keys = read_keys(settings.identity_path.parent / document.api_keys.path).keys
            issuers |= {key.issuer for key in keys}
    if len(issuers) > 1 and not listed:
        names = ", ".join(f"`{one}`" for one in sorted(issuers))
        raise ConfigError(
            f"identity document `{settings.identity_path}`: {names} name tenants, and the policy lists no `issuers`; "
            "list them there, first the one whose tenants keep their bare ids",
            path=settings.identity_path,
        )


def open_verifier(settings: Settings, clock: Clock | None = None) -> ScopeTokens:
    """Return the verifier for an engine process, over the same secret."""
    with open_scope_key(settings.scope_token_key_path) as secret:
        clock = _process_clock(settings, clock)
        return ScopeTokens(secret, clock, remembered_max=settings.scope_tokens_remembered_max)


def open_windowed(settings: Settings, clock: Clock, policy: Policy) -> WindowedTokens | None:
    """Return the verifier of windowed tokens from the document's doors; None where the setting is off.

    Raises `ConfigError` where the document names no doors. The log says where blocks stay longer than a window.
    """
    if not settings.windowed_token_seconds:
        return None
    idle_seconds = max(one.idle_us for one in policy.retention) // SECOND_US
    if settings.windowed_token_seconds < idle_seconds:
        _LOG.warning(
            "windows are shorter than idle times: routers cannot find blocks after their window",
            windowed_token_seconds=settings.windowed_token_seconds,
            idle_seconds=idle_seconds,
        )
    doors = open_identity(settings).doors
    if doors is None:
        raise ConfigError("windowed_token_seconds: the identity document lists no `doors`")
    keys = WatchedFile(settings.identity_path.parent / doors.keys, read_door_keys, clock).content
    window = settings.windowed_token_seconds
    return WindowedTokens(keys, clock, window_seconds=window, group=doors.group)


def _process_clock(settings: Settings, clock: Clock | None) -> DeadlineClock:
    """Return the clock for a process that is ended by a kill, which stores its time often enough for that."""
    return settings.open_clock(clock, ExitStack())


def open_attempts(settings: Settings, clock: Clock) -> AttemptsReporter:
    """Return the book in which a door notes its refusals; close it at the end."""
    recorder_ = _Recorder(settings, clock)
    return AttemptsReporter(Attempts(_PLACE, clock), recorder_, ended=recorder_.close)


class _Recorder:
    """Records refused identities in the ledger that the engine writes to; used by one thread at a time.

    Nothing is opened before the first of them. Behind a control plane that one writes, told under the worker's own key;
    else the ledger's database is written to, under a name of the door's own.
    """

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._stack = ExitStack()  # open until `close`
        self._connection: ControlPlaneConnection | None = None
        self._writer: EventWriter | None = None

    def __call__(self, taken: Sequence[Attempted]) -> None:
        if self._settings.control_plane:
            self._hand_over(taken)
        else:
            self._write(taken)

    def close(self) -> None:
        """Record the orderly end of what was opened; nothing is recorded after it."""
        self._stack.close()

    def _hand_over(self, taken: Sequence[Attempted]) -> None:
        if self._connection is None:
            self._connection = connect(self._settings, self._stack)
        since_us = min(one.from_us for one in taken)
        items = [{"reason": one.reason, "source": one.source, "attempts": one.attempts} for one in taken]
        seconds = max(0, self._clock.now_us() - since_us) // MICROSECONDS
        self._connection.post("/v1/worker/attempts", {"seconds": seconds, "items": items})

    def _write(self, taken: Sequence[Attempted]) -> None:
        if self._writer is None:
            self._check_there()
            engine = open_store(self._settings.database_url)
            self._stack.callback(engine.dispose)
            self._writer = self._stack.enter_context(recorder(engine, self._clock, _PLACE))
        now_us, worker = self._clock.now_us(), self._settings.worker_name
        self._writer.submit(events_of(_PLACE, taken, now_us, of_worker=worker))
        if not self._writer.flush():
            raise LedgerError("the ledger does not accept records")

    def _check_there(self) -> None:
        """Require that the ledger exists, because the engine creates it.

        Raises:
            LedgerError: there is none yet.
        """
        engine = open_store(self._settings.database_url, read_only=True)
        try:
            check_store(engine)
        except SQLAlchemyError as problem:
            raise ledger_error(engine, problem) from problem
        finally:
            engine.dispose()
