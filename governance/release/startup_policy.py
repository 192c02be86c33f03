"""The policy that a worker starts with, by its settings: a release's, a signed bundle's, or a plain document's.

1. Where the settings name a trust configuration, nothing unsigned is started with.
2. A policy of another profile than the deployment promises is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Engine

from kvcustody.audit.kinds import Event, PolicyActivated, PolicyStaged
from kvcustody.clock import Clock
from kvcustody.errors import ConfigError
from kvcustody.governance.decisions.policy_on_record import documents_on_record, revoked_on_record
from kvcustody.governance.decisions.staged_table import StagedTable
from kvcustody.governance.release.reader import ReleaseReader
from kvcustody.governance.release.rollback_guard import RevisionMark
from kvcustody.governance.release.store import FolderStore, ReleaseStore, SqlStore
from kvcustody.governance.release.trust import TrustFile, read_trust
from kvcustody.governance.settings import Settings
from kvcustody.policies.bundle.bundle import verify
from kvcustody.policies.document.model import Policy
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from kvcustody.policies.table.decision_table import DecisionTable

LEDGER = "ledger"


class StartupPolicy(NamedTuple):
    """A table, its expiry (UTC, None: never), and the release to follow from there on, if there is one.

    `heard`: it is word from the release itself, not what was kept of it. `waits`: its store holds questions open.
    """

    table: DecisionTable
    expires_utc_us: int | None = None
    reader: ReleaseReader | None = None
    heard: bool = True
    waits: bool = False


def open_startup_policy(settings: Settings, engine: Engine, clock: Clock) -> StartupPolicy:
    """Return the policy to start with; raises `CustodyError` with the reason without one."""
    if settings.policy_release:
        return released_startup_policy(SqlStore(engine) if settings.policy_release == LEDGER else None, settings)
    return startup_policy_of_file(settings, clock)


def released_startup_policy(store: ReleaseStore | None, settings: Settings) -> StartupPolicy:
    """Return what is in effect in a release; `store` None: the folder of the settings."""
    trust = TrustFile(Path(settings.policy_trust))
    store = store or FolderStore(Path(settings.policy_release))
    reader = ReleaseReader(store, trust.current, RevisionMark(settings.policy_mark_path))
    return StartupPolicy(*reader.first(settings.profile), reader)


def startup_policy_of_file(settings: Settings, clock: Clock) -> StartupPolicy:
    """Read `policy_path`: a signed bundle, or a plain document."""
    if settings.policy_trust:
        return _from_bundle(settings, clock)
    policy = load_policy(_read(settings.policy_path), name=str(settings.policy_path))
    _check_profile(policy, settings)
    return StartupPolicy(compile_policy(policy, revision=1))


def _from_bundle(settings: Settings, clock: Clock) -> StartupPolicy:
    mark = RevisionMark(settings.policy_mark_path)
    verified = verify(
        _read(settings.policy_path),
        read_trust(Path(settings.policy_trust)),
        now_utc_us=clock.utc_us(),
        revision_min=mark.mark.revision,
    )
    _check_profile(verified.policy, settings)
    manifest = verified.bundle.manifest
    mark.advance(manifest)
    table = compile_policy(verified.policy, revision=manifest.revision, revoked=frozenset(manifest.revoked))
    return StartupPolicy(table, manifest.expires_us)


def events_beside_activation(table: DecisionTable, at_us: int, actor: str) -> list[Event]:
    """Return what a starting worker records beside its activation: its document, and the ids revoked at the start."""
    return [
        *revoked_on_record(table.revoked, table.revision, at_us, actor),
        *documents_on_record(table, at_us),
    ]


def activation_events(table: DecisionTable, at_us: int, actor: str) -> list[Event]:
    """Return what puts a starting worker's policy on record: its revision, and one staged beside it."""
    base = table.base if isinstance(table, StagedTable) else table
    policy = base.policy
    events: list[Event] = [PolicyActivated(at_us, base.revision, policy.name, policy.profile.value, base.digest, actor)]
    if isinstance(table, StagedTable):
        name = table.policy.name
        events.append(PolicyStaged(at_us, table.revision, name, table.digest, table.stage, actor, base.revision))
    return events


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"policy `{path}`: {error.strerror}; the setting `policy_path` names the file, and `kvcustody policy init` "
            "makes one",
            path=path,
        ) from error


def _check_profile(policy: Policy, settings: Settings) -> None:
    path = settings.policy_path
    if policy.profile.value != settings.profile:
        raise ConfigError(
            f"policy `{path}` has the profile `{policy.profile.value}`, this deployment promises `{settings.profile}`",
            path=path,
            profile=settings.profile,
        )
