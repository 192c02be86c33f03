"""Opens a worker's parts behind a control plane: the connection, the policy, the ledger, the erasures.

1. A worker does not start with a key that is refused or a name that is not the key's. Nor does it with an unusable
   certificate or address.
2. Where the control plane is unreachable, a worker starts only with a signed policy that it has kept. The policy's
   stated expiry applies, and the lease counts as over. The worker's events go to the spill until the control plane is
   back.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from urllib.parse import quote

from kvcustody.audit.tlog.signed_note import NoteError, VerifierKey, parse_vkey
from kvcustody.audit.write.event_writer import ENGINE_DURABLE_SECONDS, WriterSettings
from kvcustody.clock import Clock
from kvcustody.errors import ConfigError, ServiceError
from kvcustody.files import read_words
from kvcustody.governance.control_plane.connection import ControlPlaneConnection, is_away, read_key_file
from kvcustody.governance.control_plane.erasures import RemoteInbox
from kvcustody.governance.control_plane.release_store import WorkerReleaseStore
from kvcustody.governance.control_plane.remote_ledger import RemoteLedger
from kvcustody.governance.release.startup_policy import (
    StartupPolicy,
    released_startup_policy,
    startup_policy_of_file,
)
from kvcustody.governance.settings import CONTROL_PLANE, Settings

_WAIT_SECONDS_MAX = 10


def connect(settings: Settings, stack: ExitStack) -> ControlPlaneConnection:
    """Connect to the control plane of the settings; raises `ConfigError` for settings that cannot be used."""
    assert settings.control_plane_key_path is not None  # the settings see to it
    connection = ControlPlaneConnection(
        settings.control_plane,
        read_key_file(settings.control_plane_key_path),
        authority=settings.control_plane_ca_path,
        certificate=settings.control_plane_certificate_path,
        certificate_key=settings.control_plane_certificate_key_path,
    )
    stack.callback(connection.close)
    return connection


def remote_startup_policy(settings: Settings, connection: ControlPlaneConnection, clock: Clock) -> StartupPolicy:
    """Return the policy to start with; from the control plane's release where the settings say so (rule 2)."""
    if settings.policy_release == CONTROL_PLANE:
        mark = settings.policy_mark_path
        wait = min(_WAIT_SECONDS_MAX, settings.policy_lease_seconds // 6)
        kept = mark.with_name(mark.name + ".release")
        store = WorkerReleaseStore(connection, kept_path=kept, wait_seconds=wait)
        return released_startup_policy(store, settings)._replace(heard=store.heard, waits=wait > 0)
    return (
        released_startup_policy(None, settings) if settings.policy_release else startup_policy_of_file(settings, clock)
    )


def open_remote_ledger(
    settings: Settings, connection: ControlPlaneConnection, clock: Clock, *, may_be_away: bool | None = None
) -> RemoteLedger:
    """Open the ledger behind the control plane; raises `ConfigError` with the reason (rule 1).

    `may_be_away`: whether it opens while the control plane is away; None: where the policy is signed, as for a worker.
    """
    signed = bool(settings.policy_trust) if may_be_away is None else may_be_away
    try:
        return RemoteLedger(
            connection,
            worker=settings.worker_name,
            clock=clock,
            spill_directory=_spill(settings),
            settings=WriterSettings(
                durable_seconds=ENGINE_DURABLE_SECONDS,
                interval_seconds=settings.ledger_batch_ms / 1000,
                spill_bytes=int(settings.spill_bytes_max),
                replay_share=settings.replay_share,
            ),
            may_be_away=signed,
            kept_bytes=int(settings.kept_bytes_max),
            trusted=() if settings.ledger_keys_path is None else read_verifier_keys(settings.ledger_keys_path),
        )
    except ServiceError as error:
        raise ConfigError(_unopened(settings, error, signed)) from None


def open_inbox(
    settings: Settings, connection: ControlPlaneConnection, offset_us: int, clock: Clock, lease_seconds: float
) -> RemoteInbox:
    """Open the worker's inbox; restrictions that it heard are kept in a file beside the spill."""
    kept = _spill(settings) / "restrictions.json"
    return RemoteInbox(connection, offset_us, kept, clock=clock, lease_seconds=lease_seconds)


def _unopened(settings: Settings, error: ServiceError, signed: bool) -> str:
    """One line on why there is no start."""
    where, worker = settings.control_plane, settings.worker_name
    if not is_away(error):
        key = settings.control_plane_key_path
        return f"control plane `{where}` refuses worker `{worker}` with the key in `{key}`: {error.message}"
    why = "" if signed else "; a policy without signatures (`policy_trust`) is not enforced while it is away"
    return f"worker `{worker}` cannot register: {error.message}{why}"


def _spill(settings: Settings) -> Path:
    """The worker's own folder in the spill: one worker's key hands in no other's events."""
    return settings.spill_path / quote(settings.worker_name, safe="")


def read_verifier_keys(path: Path) -> tuple[VerifierKey, ...]:
    """Read the public keys in a file, one a line; raises `ConfigError`."""
    try:
        lines = read_words(path).split()
        keys = tuple(map(parse_vkey, lines))
    except (OSError, UnicodeDecodeError, NoteError) as problem:
        why = problem.message if isinstance(problem, NoteError) else type(problem).__name__
        raise ConfigError(f"ledger keys `{path}`: {why}", path=path) from None
    if not keys:
        raise ConfigError(f"ledger keys `{path}`: holds no key", path=path)
    return keys
