"""The folder of `kvcustody up`: its service, its people with their keys, and the active policy.

1. A folder that holds something else is refused. One that an earlier `up` left is gone on with: same ledger, same keys.
2. Whoever signs policies is three people with three keys, as anywhere; the person of the sign-in link writes none.
3. Keys lie in `keys/`, each 0600, and are made anew at every start; they end after a day.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvcustody.audit.tlog.signing_key import create_signing_key, read_signing_key
from kvcustody.clock import SystemClock
from kvcustody.errors import ConfigError
from kvcustody.files import private_folder, write_file
from kvcustody.governance.decisions.segment_matcher import declare
from kvcustody.governance.identity.domain_spec import tenant_owner
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.wrapped_key_store import FileKeyStore
from kvcustody.governance.release.release_desk import ReleaseWorkflow
from kvcustody.governance.release.signer import open_signer
from kvcustody.governance.release.store import SqlStore
from kvcustody.governance.release.trust import write_trust
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.service import Service
from kvcustody.governance.service.settings import ServiceSettings
from kvcustody.governance.settings import CONTROL_PLANE, Settings
from kvcustody.governance.worker.plugins import open_root_key
from kvcustody.lab.replay.run.model_identity import replay_model
from kvcustody.lab.replay.traces.token_ids import expand
from kvcustody.lab.replay.workload.generator import WorkloadSpec, house_prompt
from kvcustody.lab.replay.workload.tenant_assignment import ISSUER
from kvcustody.lab.traffic.office import PEOPLE, WORKER, YOU
from kvcustody.policies import library

MARK = "up.toml"
SIGNERS: dict[str, tuple[str, str | None]] = {
    "author": ("author", None),
    YOU: ("approver", None),
    "owner": ("owner", "acme"),
    "orders": ("orders", None),  # the service's own
}
_DIGEST = "hmac:" + 64 * "0"
# What makes an hour's life visible in minutes; everything else is the library's `regulated-saas`.
_SHORTER = (
    (
        "internal:     {idle: 30m, absolute: 8h, active_max: 2h}",
        "internal:     {idle: 3m, absolute: 1h, active_max: 30m}",
    ),
    (
        "      internal: {idle: 10m, absolute: 2h, active_max: 1h}",
        "      internal: {idle: 2m, absolute: 30m, active_max: 20m}",
    ),
    (
        "confidential: {idle: 5m,  absolute: 1h, active_max: 1h}",
        "confidential: {idle: 1m, absolute: 10m, active_max: 10m}",
    ),
    (
        "  public:       never\n  internal:     never",
        "  public:       {tiers: [host], encrypt: required}\n  internal:     {tiers: [host], encrypt: required}",
    ),
)
_GRANT = "rules:\n"
_MORE = """\
  - id: globex-reads-acme
    owner: acme
    reader: globex
    at_most: internal
    until: 2027-03-31
    reason: a joint pilot; it waits for an approval and for its owner's consent

"""


@contextmanager
def claimed(folder: Path) -> Iterator[bool]:
    """Claim a folder for a start (rule 1); yields whether it is new. A failed start leaves no folder behind."""
    try:
        fresh = not folder.exists() or not any(folder.iterdir())
        if not fresh and not (folder / MARK).exists():
            raise ConfigError(f"folder `{folder}`: has files that `kvcustody up` did not create; name another")
        had = folder.exists()
        private_folder(folder)
        folder.chmod(0o700)
        if fresh:
            write_file(folder / MARK, b'made_by = "kvcustody up"\n')
    except OSError as error:
        raise ConfigError(f"folder `{folder}`: {error.strerror}", path=folder) from None
    try:
        yield fresh
    except BaseException:
        if fresh:
            for place in folder.iterdir():
                shutil.rmtree(place) if place.is_dir() else place.unlink()
            if not had:
                folder.rmdir()
        raise


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port of this machine on which nothing listens now."""
    with socket.create_server((host, 0)) as probe:
        return int(probe.getsockname()[1])


def plane_settings(folder: Path, port: int, **more: Any) -> ServiceSettings:
    """Return the service's settings; `more` overrides them."""
    fields: dict[str, Any] = {
        "database_url": f"sqlite:///{folder / 'ledger.db'}",
        "state_path": folder / "service",
        "listen": f"127.0.0.1:{port}",
        "signing_key_path": folder / "signing.key",
        "policy_trust": _trust(folder),
        "order_key_path": signing_file(folder, "orders"),
        "figures_seconds": 5.0,
        "shutdown_seconds": 3,
        "log_level": "error",
    }
    return ServiceSettings(**(fields | more))


def worker_settings(folder: Path, listen: str, name: str = WORKER, *, home: str = "worker") -> Settings:
    """Return a worker's settings, connected to the service like any worker; `home`: the folder for its own files.

    Root key and keyring are those of all workers of the folder.
    """
    shared, home_folder = folder / "worker", folder / home
    for each in (shared, home_folder):
        each.mkdir(mode=0o700, exist_ok=True)
    fields: dict[str, Any] = {
        "worker_name": name,
        "control_plane": f"http://{listen}",
        "control_plane_key_path": key_file(folder, name),
        "policy_trust": str(folder / "trust.toml"),
        "policy_release": CONTROL_PLANE,
        "policy_mark_path": home_folder / "policy.mark",
        "spill_path": home_folder / "spill",
        "root_key_path": shared / "root.key",
        "keyring_path": shared / "keys.json",
        "shred_keys_path": shared / "shred.keys",
        "signing_key_path": home_folder / "signing.key",
        "scrub_tuning_path": home_folder / "scrub-tuning.json",
        "host_tier_bytes": 64 << 20,
    }
    return Settings(**fields)


def key_file(folder: Path, name: str) -> Path:
    """Return the path of a person's API key."""
    return folder / "keys" / f"{name}.key"


def signing_file(folder: Path, name: str) -> Path:
    """Return the path of a person's policy signing key."""
    return folder / "keys" / f"{name}.signing.key"


def enrol_people(service: Service, folder: Path, machines: Mapping[str, frozenset[Role]] | None = None) -> None:
    """Enrol everyone, and `machines` with their roles, each with a new key (rule 3)."""
    others = {name: (roles, None) for name, roles in (machines or {}).items()}
    for name, (roles, tenant) in (PEOPLE | others).items():
        if service.principals.find(name) is None:
            service.principals.enrol(name, sorted(roles), tenant=tenant, by="local:up")
        issued = service.principals.issue_key(name, days=1, overlap_days=0, by="local:up")
        write_file(key_file(folder, name), issued.key.encode())


def release_policy(service: Service, folder: Path, spec: WorkloadSpec) -> None:
    """Activate the policy where none is active, and propose another that needs an approval and a consent."""
    desk = ReleaseWorkflow(SqlStore(service.engine), service.policies.trust, clock=service.clock, ledger=service.writer)
    if desk.state().active is not None:
        return
    author, approver, owner = (open_signer(signing_file(folder, name)) for name in ("author", YOU, "owner"))
    text = policy_text(folder, spec)
    desk.propose(text, author, note="the library's regulated-saas, with shorter deadlines")
    desk.approve(1, approver, cells=desk.review(1).cells)
    for opening in sorted({opening.id for opening in desk.review(1).missing}):
        desk.consent(1, opening, owner)
    desk.activate(1, approver)
    desk.propose(text.replace(_GRANT, _MORE + _GRANT, 1), author, note="let globex reuse what acme prepared")


def policy_text(folder: Path, spec: WorkloadSpec) -> str:
    """Return the policy document, whose segment is the workload's house prompt."""
    text = library.source("regulated-saas")
    for long, short in _SHORTER:
        if long not in text:
            raise ConfigError(f"the library's regulated-saas has no `{long}` any more")
        text = text.replace(long, short)
    settings = worker_settings(folder, "127.0.0.1:1")
    prompt, model = expand(house_prompt(spec), spec.block_tokens), replay_model(spec.block_tokens)
    owner = tenant_owner(ISSUER, "acme")
    keyring = Keyring(FileKeyStore(settings.keyring_path), open_root_key(settings), SystemClock())
    try:
        keyring.ensure([owner])
        made = declare(keyring, owner, prompt, model=model.digest, block_tokens=model.block_tokens)
    finally:
        keyring.close()
    text = text.replace(_DIGEST, f"hmac:{made.digest}").replace("tokens: 512", f"tokens: {made.tokens}")
    return text + "route_receipts: {default: all}\n"


def _trust(folder: Path) -> Path:
    """Return the policies' trust configuration, with the signers' keys (rule 2)."""
    path = folder / "trust.toml"
    if not (path.exists() and all(signing_file(folder, name).exists() for name in SIGNERS)):
        (folder / "keys").mkdir(mode=0o700, exist_ok=True)
        rows = []
        for name, (role, tenant) in SIGNERS.items():
            file = signing_file(folder, name)
            key = read_signing_key(file) if file.exists() else create_signing_key(file, name)
            rows.append((str(key.verifier), role, tenant))
        write_file(path, write_trust("up", rows).encode())
    return path
