"""The release commands' shared options, and the desk that they open."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from sqlalchemy import Engine

from kvcustody.audit.evidence.processes.enforcement import worker_enforcement
from kvcustody.audit.evidence.processes.running_policies import read_running_policies
from kvcustody.audit.store.database.engine import check_store, open_store
from kvcustody.audit.tlog.signed_note import parse_vkey
from kvcustody.audit.write.event_writer import EventWriter
from kvcustody.clock import SystemClock
from kvcustody.console.command import Json
from kvcustody.console.opening import connect, reading, service_settings
from kvcustody.console.options import ControlPlane
from kvcustody.deadline_clock import DeadlineClock
from kvcustody.errors import ConfigError, LedgerError
from kvcustody.files import private_folder, read_words
from kvcustody.governance.control_plane.consents import OwnerConsents
from kvcustody.governance.control_plane.release_store import WorkflowReleaseStore
from kvcustody.governance.ledger_protocol import CountingLedger
from kvcustody.governance.release.policies_in_effect import policies_in_effect
from kvcustody.governance.release.release_desk import ReleaseWorkflow
from kvcustody.governance.release.replay_records import ReleaseState
from kvcustody.governance.release.signer import open_signer
from kvcustody.governance.release.store import FolderStore, ReleaseStore, SqlStore
from kvcustody.governance.release.trust import read_trust
from kvcustody.governance.service.operations.parameter_groups import ParameterGroup
from kvcustody.migrations.upgrade import upgrade
from kvcustody.policies.bundle.trust import KeyRole, Signer

SigningKey = Annotated[
    Path, typer.Option("--signing-key", help="Your private key's file, from `kvcustody policy key`.")
]
TrustFile = Annotated[
    Path,
    typer.Option("--trust", envvar="KVCUSTODY_POLICY_TRUST", help="The trust configuration."),
]
Store = Annotated[
    str,
    typer.Option(
        "--store",
        envvar="KVCUSTODY_POLICY_RELEASE",
        help="A release folder, or a database URL (sqlite:///… or postgresql://…); not with --server.",
    ),
]
Revision = Annotated[int, typer.Argument(help="A revision's number.", metavar="REVISION", min=1)]
Reason = Annotated[str, typer.Option("--reason", help="Why; it is recorded.")]
Note = Annotated[str, typer.Option("--note", help="What changes and why; it is recorded.")]

TRUST, STORE = Path("trust.toml"), "release"
_SERVICE_CONFIG = "KVCUSTODY_SERVICE_CONFIG"
_NOWHERE = ControlPlane()


@dataclass(frozen=True, kw_only=True)
class At(ParameterGroup):
    """The release that a command is about, and the format of its answer."""

    store: Store = STORE
    trust: TrustFile = TRUST
    remote: ControlPlane
    as_json: Json = False

    def desk(self) -> AbstractContextManager[ReleaseWorkflow]:
        """Return the desk for this release."""
        return open_workflow(self.store, trust_file(self.trust, self.store), self.remote)

    def in_effect(self, state: ReleaseState) -> dict[str, Any] | None:
        """Return the policies that workers run, as the API reports them; None for a folder, whose ledger has no
        workers.
        """
        if self.remote.server is not None:
            with connect(self.remote) as plane:
                found: dict[str, Any] = plane.get("/v1/policies/in-effect")
                return found
        if "://" not in self.store:
            return None
        with reading(self.store) as engine, engine.connect() as connection:
            return policies_in_effect(read_running_policies(connection), state, worker_enforcement(connection)).data()

    def owner_consents(self) -> AbstractContextManager[OwnerConsents]:
        """Return the owner's part in a release at a control plane."""
        return owner_consents(self.remote, trust_file(self.trust, self.store))


def trust_file(named: Path, store: str) -> Path:
    """Return the trust configuration: the named one, or that of the service's settings.

    One beside the store is only pointed at: who can write a release there could choose who may sign it.

    Raises:
        ConfigError: there is none; it says where this looked.
    """
    if named != TRUST or named.exists():
        return named
    config = os.environ.get(_SERVICE_CONFIG)
    settings = service_settings(None if config is None else Path(config), None)
    if settings.policy_trust is not None:
        return settings.policy_trust
    looked = f"looked for `{Path.cwd() / TRUST}` and for `policy_trust` in the service's settings"
    looked += f" (`{config}`)" if config else f" ({_SERVICE_CONFIG} names none)"
    place = Path(store.removeprefix("sqlite:///"))
    beside = [folder / TRUST for folder in (place, place.parent) if (folder / TRUST).is_file() and folder != Path()]
    there = f" There is one at `{beside[0]}`: name it if you trust whoever writes there." if beside else ""
    raise ConfigError(
        f"no trust file: {looked}. Name it with --trust or KVCUSTODY_POLICY_TRUST, or make one with "
        f"`kvcustody policy trust`.{there}",
        path=str(named),
    )


def acts_as_owner(trust: Path, signer: Signer) -> bool:
    """Return whether this key is an owner's and permits nothing more."""
    key = read_trust(trust).keys.get(signer.name)
    return key is not None and key.roles == {KeyRole.OWNER}


@contextmanager
def owner_consents(remote: ControlPlane, trust: Path) -> Iterator[OwnerConsents]:
    """Yield an owner's part in a release at a control plane: pending consents, and grants to revoke."""
    assert remote.server is not None
    with connect(remote) as connection:
        yield OwnerConsents(connection, read_trust(trust).audience, SystemClock())


@contextmanager
def open_workflow(store: str, trust: Path, remote: ControlPlane = _NOWHERE) -> Iterator[ReleaseWorkflow]:
    """Yield the desk over a store.

    Every step is recorded in the ledger: the database's own, the one in the release folder, or the control plane's,
    which records it itself.
    """
    if remote.server is not None:
        if store != STORE:
            raise ConfigError(
                "--server and --store name two releases: give one of them (KVCUSTODY_SERVER and "
                "KVCUSTODY_POLICY_RELEASE count as well)"
            )
        with connect(remote) as connection:
            records = WorkflowReleaseStore(connection)
            clock = DeadlineClock(SystemClock())  # the control plane keeps time
            yield ReleaseWorkflow(records, read_trust(trust), clock=clock, ledger=CountingLedger())
        return
    if store == "ledger":
        raise ConfigError("`ledger` is a worker's setting; here, name the ledger's database by its URL")
    with ExitStack() as stack:
        trusted = read_trust(trust)
        is_folder = "://" not in store
        folder = Path(store) if is_folder else Path("kvcustody.spill")
        if is_folder and not folder.is_dir():
            raise ConfigError(f"release folder `{folder}`: no such folder; make one with `kvcustody policy trust`")
        engine = open_store(folder / "ledger.db" if is_folder else store)
        stack.callback(engine.dispose)
        _bring_up(engine)
        spill = folder / "spill" if is_folder else folder
        private_folder(spill)
        clock = DeadlineClock(SystemClock(), spill / "clock.json")
        writer = stack.enter_context(EventWriter(engine, worker="policy-release", clock=clock, spill_directory=spill))
        kept: ReleaseStore = FolderStore(folder) if is_folder else SqlStore(engine)
        yield ReleaseWorkflow(kept, trusted, clock=clock, ledger=writer)


def _bring_up(engine: Engine) -> None:
    """Upgrade the ledger's schema to this program's; checking first is faster than an empty migration."""
    try:
        check_store(engine)
    except LedgerError:
        upgrade(engine)


def signer_of(path: Path) -> Signer:
    """Return the signer for a key file, or for the extension that holds the key."""
    return open_signer(path)


def read_document(path: Path) -> str:
    """Return a policy document's text.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return read_words(path)
    except OSError as error:
        raise ConfigError(f"policy `{path}`: {error.strerror}", path=path) from None
    except UnicodeDecodeError:
        raise ConfigError(f"policy `{path}`: is not UTF-8", path=path) from None


def read_public(path: Path) -> str:
    """Return a public key's text from the `.pub` file next to a private key.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        text = read_words(path).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"public key `{path}`: {getattr(error, 'strerror', 'is not text')}", path=path) from None
    parse_vkey(text)
    return text
