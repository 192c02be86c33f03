"""The middleware's parts, from the settings of this process."""

from __future__ import annotations

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
from kvcustody.governance.control_plane.opening import connect
from kvcustody.governance.credentials.api_key_file import read_keys
from kvcustody.governance.credentials.scope_token import ScopeTokens
from kvcustody.governance.credentials.scope_token_secret import open_scope_key
from kvcustody.governance.observability.attempts import Attempted, Attempts, AttemptsReporter, events_of
from kvcustody.governance.settings import Settings
from kvcustody.integrations.identity.identity_document import IdentityDocument, load_identity
from kvcustody.integrations.identity.request_gate import RequestGate
from kvcustody.integrations.identity.routes import VLLM_SERVER, EngineServer

_PLACE = "door"


def open_request_gate(
    settings: Settings, clock: Clock | None = None, *, server: EngineServer = VLLM_SERVER
) -> RequestGate:
    """The gate of an API server of this kind; `ConfigError` or `KeyringError` if a file is missing or wrong."""
    document = open_identity(settings)
    clock = _process_clock(settings, clock)
    with open_scope_key(settings.scope_token_key_path) as secret:
        return RequestGate(
            document,
            settings.identity_path.parent,
            secret,
            clock,
            token_seconds=settings.scope_token_seconds,
            server=server,
            namespace_days=settings.namespace_days,
            worker=settings.worker_name,
        )


def open_identity(settings: Settings) -> IdentityDocument:
    """The identity document of the settings; `ConfigError` that names the setting where there is none."""
    if not settings.identity_path.exists():
        raise ConfigError(
            f"identity document `{settings.identity_path}`: there is none; the setting `identity_path` names it "
            "(docs/operate/identity.md)",
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
    """The verifier of an engine process, over the same secret."""
    with open_scope_key(settings.scope_token_key_path) as secret:
        clock = _process_clock(settings, clock)
        return ScopeTokens(secret, clock, remembered_max=settings.scope_tokens_remembered_max)


def _process_clock(settings: Settings, clock: Clock | None) -> DeadlineClock:
    """The clock of a process that ends when it is killed: what is kept of time by then is enough."""
    return settings.open_clock(clock, ExitStack())


def open_attempts(settings: Settings, clock: Clock) -> AttemptsReporter:
    """What a door notes its refusals in; close it at the end."""
    recorder_ = _Recorder(settings, clock)
    return AttemptsReporter(Attempts(_PLACE, clock), recorder_, ended=recorder_.close)


class _Recorder:
    """Puts refused identities on record in the ledger that the engine writes to; belongs to one thread at a time.

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
            raise LedgerError("the ledger takes nothing")

    def _check_there(self) -> None:
        """Raises `LedgerError` where there is no ledger yet: the engine makes it, and not its door."""
        engine = open_store(self._settings.database_url, read_only=True)
        try:
            check_store(engine)
        except SQLAlchemyError as problem:
            raise ledger_error(engine, problem) from problem
        finally:
            engine.dispose()
