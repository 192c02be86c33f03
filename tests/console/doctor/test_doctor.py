"""`kvcustody doctor`: each misconfiguration is planted and found, with what to do; the sound ones are controls."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cryptography.hazmat.primitives import serialization
from sqlalchemy import Engine, insert, text, update
from typer.testing import CliRunner

from kvcustody.audit.store.database.engine import VERSION_TABLE, open_store
from kvcustody.audit.store.schema.retention import cosignatures
from kvcustody.audit.store.schema.service import service_keys
from kvcustody.audit.store.schema.trees import signed_checkpoints
from kvcustody.audit.tlog.signing_key import create_signing_key
from kvcustody.clock import SystemClock
from kvcustody.console.doctor import command, ledger, machine, worker
from kvcustody.console.doctor.findings import CHECKS, Diagnosis, Examined, State, examine, run_check
from kvcustody.console.main import app
from kvcustody.errors import ConfigError
from kvcustody.governance.service import open_files
from kvcustody.governance.service.service import open_service
from kvcustody.governance.service.settings import InboxWebhook, Webhook
from kvcustody.governance.settings import Settings
from kvcustody.times import DAY_US
from standins.certificates import Authority
from standins.service.service_world import settings_in
from standins.waiting import until

POLICY = Path(command.__file__).resolve().parents[2] / "policies/library/regulated-saas.yaml"


class Sound(NamedTuple):
    """A folder whose settings and ledger are all right, and what is to be changed in it."""

    folder: Path
    service: dict[str, Any]
    worker: dict[str, Any]
    environment: dict[str, str]
    now: list[int]  # microseconds that the clock is ahead

    def engine(self) -> Engine:
        """Writes to the ledger without its guards."""
        return open_store(f"sqlite:///{self.folder}/ledger.db")

    def subject(self) -> Examined:
        service = settings_in(self.folder, **self.service)
        return Examined(
            service,
            Settings(**self.worker),
            service.database_url,
            open_store(service.database_url, read_only=True),
            Ahead(self.now[0] if self.now else 0),
            self.environment,
        )


class Ahead(SystemClock):
    """A wall clock that is ahead by so much."""

    def __init__(self, by_us: int) -> None:
        super().__init__()
        self._by_us = by_us

    def utc_us(self) -> int:
        return super().utc_us() + self._by_us


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, migrated: Path) -> Path:
    """A folder whose ledger a service has signed."""
    folder = tmp_path_factory.mktemp("served")
    shutil.copy(migrated, folder / "ledger.db")
    settings = settings_in(folder, root_interval_seconds=0.05)
    with open_service(settings):
        engine = open_store(settings.database_url, read_only=True)
        until(lambda: bool(_signed(engine)))
        engine.dispose()
    return folder


def _signed(engine: Engine) -> Any:
    with engine.connect() as connection:
        return connection.scalar(text(f"SELECT max(size) FROM {signed_checkpoints.name}"))


@pytest.fixture
def sound(tmp_path: Path, served: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sound]:
    """A deployment on a disk, wherever the tests' temporary files lie."""
    folder, mounts = tmp_path / "sound", tmp_path / "disks"
    mounts.write_text("/dev/sda / ext4 rw 0 0\n")
    monkeypatch.setattr(ledger, "_MOUNTS", mounts)
    shutil.copytree(served, folder)
    worker = {
        "database_url": f"sqlite:///{folder}/ledger.db",
        "policy_path": POLICY,
        "keyring_path": folder / "keys.json",
        "signing_key_path": folder / "signing.key",
        **{f"{name}_path": folder / name for name in ("root_key", "scope_token_key", "shred_keys", "spill")},
    }
    yield Sound(folder, {}, worker, {}, [])


def write_key(path: Path, mode: int = 0o600) -> Path:
    path.write_bytes(b"k" * 32)
    path.chmod(mode)
    return path


def _other_schema(sound: Sound) -> None:
    with sound.engine().begin() as connection:
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '9999'"))


def _without_ledger(sound: Sound) -> None:
    (sound.folder / "ledger.db").unlink()


def _other_key(sound: Sound) -> None:
    (sound.folder / "signing.key").unlink()
    create_signing_key(sound.folder / "signing.key", "other.example")


def _old_witness(sound: Sound) -> None:
    with sound.engine().begin() as connection:
        row = {"size": 1, "witness": "w", "line": b"", "at_us": SystemClock().utc_us() - 3 * DAY_US}
        connection.execute(insert(cosignatures), row)


def _key_ends(sound: Sound, in_us: int) -> None:
    with open_service(settings_in(sound.folder)) as service:
        service.principals.enrol("ada", ["auditor"], by="test")
        service.principals.issue_key("ada", days=90, by="test")
    at_us = SystemClock().utc_us()
    with sound.engine().begin() as connection:
        connection.execute(update(service_keys).values(expires_us=at_us + in_us, used_us=at_us - DAY_US))


def _certificate(sound: Sound, *, ended: bool = False) -> Any:
    pair = Authority(sound.folder, "authority").issue("service", server=True, ended=ended)
    sound.service.update({"tls_certificate_path": pair.certificate, "tls_key_path": pair.key})
    return pair


def _other_pair(sound: Sound) -> None:
    _certificate(sound)
    other = Authority(sound.folder, "second").issue("other", server=True)
    sound.service["tls_key_path"] = other.key


def _open_tls_key(sound: Sound) -> None:
    _certificate(sound).key.chmod(0o644)


def _password(sound: Sound) -> None:
    """The key under a password, as `openssl` makes one unless told otherwise."""
    path = _certificate(sound).key
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    path.write_bytes(key.private_bytes(*form, serialization.BestAvailableEncryption(b"secret")))


def _handover(sound: Sound) -> None:
    authority = Authority(sound.folder, "fleet")
    pair = authority.issue("gpu-1", server=True, ended=True)
    named = {"handover_certificate_path": pair.certificate, "handover_certificate_key_path": pair.key}
    sound.worker.update(named | {"handover_ca_path": authority.pem})


def _no_certificate(sound: Sound) -> None:
    _certificate(sound).certificate.write_text("no certificate")


def _webhook(sound: Sound, path: Path) -> None:
    sound.service["webhooks"] = (Webhook(name="siem", url="https://siem.example/", key_path=path),)


def _short_webhook_key(sound: Sound) -> None:
    path = write_key(sound.folder / "hook.key")
    path.write_bytes(b"short")
    _webhook(sound, path)


def _inbox_key(sound: Sound) -> None:
    path = write_key(sound.folder / "inbox.key", 0o640)
    sound.service["inbox_webhook"] = InboxWebhook(url="https://inbox.example/", key_path=path)


def _trust(sound: Sound) -> None:
    path = sound.folder / "trust.yaml"
    path.write_text("nonsense: [")
    sound.service["policy_trust"] = path


def _root_key_is_gone(sound: Sound) -> None:
    write_key(sound.folder / "keys.json")


def _wrong_policy(sound: Sound) -> None:
    path = sound.folder / "policy.yaml"
    path.write_text("tenants: 7\n")
    sound.worker["policy_path"] = path


def _floor(sound: Sound, by_us: int) -> None:
    """The clock's floor is where the wall clock was; that is moved by so much."""
    settings_in(sound.folder).clock_file.exists() or pytest.fail("control: the service kept no floor")
    sound.now.append(by_us)


def _tier(sound: Sound, mode: int = 0o700, size: int = 1 << 20) -> None:
    path = sound.folder / "tier"
    path.mkdir(mode=mode)
    path.chmod(mode)
    sound.worker.update({"nvme_tier_path": path, "nvme_tier_bytes": size})


def _tuning(sound: Sound) -> None:
    path = sound.folder / "tuning.json"
    path.write_text('{"a device": {"unknown": 1}}')
    sound.worker["scrub_tuning_path"] = path


def _plane(sound: Sound) -> None:
    key = sound.folder / "worker.key"
    key.write_text("kvcs_none")
    key.chmod(0o600)
    del sound.worker["signing_key_path"]
    sound.worker.update({"control_plane": f"unix:{sound.folder}/nobody.sock", "control_plane_key_path": key})


Plant = Callable[[Sound], Any]
PROBLEM, WARNING = State.PROBLEM, State.WARNING
PLANTS: dict[str, tuple[str, State, Plant, str, str]] = {
    "too few files": (
        "files",
        PROBLEM,
        lambda s: s.service.update(connections_max=10**9),
        "are needed",
        "LimitNOFILE",
    ),
    "core dumps of a device": (
        "core-dumps",
        PROBLEM,
        lambda s: s.environment.update(CUDA_ENABLE_COREDUMP_ON_EXCEPTION="1"),
        "write device memory",
        "unset it",
    ),
    "a misspelt variable": (
        "variables",
        WARNING,
        lambda s: s.environment.update(KVCUSTODY_BLOKC_TOKENS="16"),
        "`KVCUSTODY_BLOKC_TOKENS` is not a setting",
        "correct",
    ),
    "a store's package is missing": (
        "packages",
        PROBLEM,
        lambda s: s.worker.update(remote_tier_url="mooncake://127.0.0.1:1/p", remote_tier_bytes=1),
        "`mooncake-transfer-engine` is not installed",
        "kvcustody[mooncake]",
    ),
    "another schema": ("ledger", PROBLEM, _other_schema, "`9999` is newer", "again"),
    "no ledger": ("ledger", PROBLEM, _without_ledger, "no ledger here", "again"),
    "a state folder that is open": (
        "state-folder",
        PROBLEM,
        lambda s: (s.folder / "state").chmod(0o755),
        "`0755`, open to others",
        "chmod 700",
    ),
    "an open signing key": (
        "signing-keys",
        PROBLEM,
        lambda s: (s.folder / "signing.key").chmod(0o644),
        "open to others",
        "again",
    ),
    "another ledger's signing key": (
        "signatures",
        PROBLEM,
        _other_key,
        "is not the key of this ledger",
        "audit keys",
    ),
    "a signing key that is gone": (
        "signatures",
        PROBLEM,
        lambda s: (s.folder / "signing.key").unlink(),
        "does not exist, and the ledger has a key",
        "backup",
    ),
    "a witness that is gone": ("witnesses", PROBLEM, _old_witness, "for 3 days", "answers"),
    "no witness": ("witnesses", WARNING, lambda s: None, "no witness has signed", "witnesses_path"),
    "a key that ends soon": (
        "credentials",
        WARNING,
        lambda s: _key_ends(s, 3 * DAY_US),
        "ends in 2 d",
        "apikey",
    ),
    "a key that has ended": (
        "credentials",
        PROBLEM,
        lambda s: _key_ends(s, -DAY_US // 2),
        "has ended",
        "apikey issue",
    ),
    "a certificate that has ended": (
        "certificates",
        PROBLEM,
        lambda s: _certificate(s, ended=True),
        "ended 1 day ago",
        "renew",
    ),
    "a certificate that ends soon": ("certificates", WARNING, _certificate, "ends in 1 day", "renew"),
    "another certificate's key": ("certificates", PROBLEM, _other_pair, "is not the key of", "pair"),
    "an open TLS key": ("certificates", PROBLEM, _open_tls_key, "`0644`, open to others", "chmod 600"),
    "a TLS key with a password": (
        "certificates",
        PROBLEM,
        _password,
        "protected by a password",
        "without one",
    ),
    "an ended certificate of hand-overs": ("certificates", PROBLEM, _handover, "ended", "renew"),
    "no certificate": ("certificates", PROBLEM, _no_certificate, "holds no certificate", "PEM"),
    "a socket's path that is too long": (
        "address",
        PROBLEM,
        lambda s: s.service.update(listen=f"unix:{'/x' * 60}"),
        "has 120 bytes",
        "shorter path",
    ),
    "a webhook's key that is gone": (
        "destination-keys",
        PROBLEM,
        lambda s: _webhook(s, s.folder / "none.key"),
        "does not exist",
        "0600",
    ),
    "a webhook's short key": (
        "destination-keys",
        PROBLEM,
        _short_webhook_key,
        "shorter than 24 bytes",
        "longer",
    ),
    "the inbox's open key": ("destination-keys", PROBLEM, _inbox_key, "`0640`, open to others", "chmod 600"),
    "a trust file that is none": ("policy-trust", PROBLEM, _trust, "trust", "again"),
    "a root key that is gone": ("keys", PROBLEM, _root_key_is_gone, "its root key", "restore the root key"),
    "an open root key": (
        "keys",
        PROBLEM,
        lambda s: write_key(s.folder / "root_key", 0o644),
        "open to others",
        "again",
    ),
    "names in clear": (
        "subject-keys",
        WARNING,
        lambda s: s.service.update(subject_names="clear"),
        "stand in",
        "sealed",
    ),
    "no store of subject keys": (
        "subject-keys",
        PROBLEM,
        lambda s: s.worker.update(database_url="postgresql://db/kv"),
        "no store of subject keys",
        "subject_keys_url",
    ),
    "a policy that is none": ("policy", PROBLEM, _wrong_policy, "policy", "again"),
    "no policy": (
        "policy",
        PROBLEM,
        lambda s: s.worker.update(policy_path=s.folder / "none.yaml"),
        "does not exist",
        "policy init",
    ),
    "a wall clock that went back": (
        "deadline-clock",
        PROBLEM,
        lambda s: _floor(s, -DAY_US),
        "behind",
        "set it right",
    ),
    "a wall clock in doubt": (
        "deadline-clock",
        PROBLEM,
        lambda s: _floor(s, DAY_US),
        "in doubt",
        "clock confirm",
    ),
    "an open tier": ("tiers", PROBLEM, lambda s: _tier(s, 0o755), "`0755`, open to others", "chmod 700"),
    "a tier larger than its disk": (
        "tiers",
        WARNING,
        lambda s: _tier(s, size=1 << 60),
        "more than its disk",
        "lower",
    ),
    "a tier without a store": (
        "tiers",
        PROBLEM,
        lambda s: s.worker.update(remote_tier_bytes=1 << 30),
        "but not `remote_tier_url`",
        "set both",
    ),
    "another version's tuning": ("scrub-tuning", WARNING, _tuning, "no tuning of this version", "remove it"),
    "no control plane": ("control-plane", PROBLEM, _plane, "cannot be reached", "again"),
}


def only(name: str, subject: Examined) -> list[Diagnosis]:
    """What one check says."""
    (checked,) = (candidate for candidate in CHECKS if candidate.name == name)
    return run_check(checked, subject)


@pytest.mark.parametrize("plant", PLANTS)
def test_each_misconfiguration_is_said_with_what_to_do(sound: Sound, plant: str) -> None:
    name, state, act, words, remedy = PLANTS[plant]
    if plant != "no witness":
        before = only(name, sound.subject())
        assert not any(each.state is state for each in before), ("control", before)
    act(sound)
    after = only(name, sound.subject())
    assert any(each.state is state and words in each.text and remedy in each.remedy for each in after), after


def test_a_sound_deployment_has_no_problem(sound: Sound) -> None:
    told: list[str] = []
    everything = examine(sound.subject(), told.append)
    assert [each for each in everything if each.state is State.PROBLEM] == []
    assert told == [each.name for each in CHECKS] and {each.check for each in everything} == set(told)


def test_every_check_has_a_plant() -> None:
    """But for those that a test below has, or that only say what is installed."""
    elsewhere = {"time", "disk", "locked-memory", "engines", "database-role", "extras"}
    assert {name for name, *_ in PLANTS.values()} | elsewhere == {each.name for each in CHECKS}


def test_a_clock_that_nobody_sets_is_said(sound: Sound, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.clock_status() in range(-1, 6), "control: the kernel answers"
    monkeypatch.setattr(machine, "clock_status", lambda: 5)
    (found,) = only("time", sound.subject())
    assert found.state is State.WARNING and "not synchronised" in found.text
    monkeypatch.setattr(machine, "clock_status", lambda: 0)
    assert only("time", sound.subject())[0].state is State.OK


@pytest.mark.parametrize(
    ("version", "state"),
    [("0.27.1", State.PROBLEM), ("0.28.0", State.OK), ("0.33.2+cu130", State.OK), ("0.34.0", State.PROBLEM)],
)
def test_an_engine_that_is_not_known_is_said(
    sound: Sound, monkeypatch: pytest.MonkeyPatch, version: str, state: State
) -> None:
    monkeypatch.setattr(machine, "_version", {"vllm": version}.get)
    (found,) = only("engines", sound.subject())
    assert found.state is state and (state is State.OK or "vllm>=0.28,<0.34" in found.remedy)


def test_memory_that_cannot_be_locked_is_said(sound: Sound, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (64 << 10, 64 << 10))
    (found,) = only("locked-memory", sound.subject())
    assert found.state is State.PROBLEM and "64 KiB may be locked" in found.text and "ulimit -l" in found.remedy


@pytest.mark.parametrize(
    ("mounts", "kind", "words"),
    [
        ("/dev/sda / ext4 rw 0 0\nhost:/x {folder} nfs4 rw 0 0\n", "nfs4", "not a known local file system"),
        ("/dev/sda / ext4 rw 0 0\ntmpfs {folder} tmpfs rw 0 0\n", "tmpfs", "in memory"),
        ("/dev/sda / ext4 rw 0 0\nhost:/x {folder}-other nfs rw 0 0\n", "ext4", ""),
    ],
)
def test_a_place_that_loses_a_ledger_is_said(
    sound: Sound, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mounts: str, kind: str, words: str
) -> None:
    file = tmp_path / "mounts"
    file.write_text(mounts.format(folder=sound.folder))
    monkeypatch.setattr(ledger, "_MOUNTS", file)
    assert ledger.filesystem_of(sound.folder / "ledger.db") == kind
    findings = [each for each in only("disk", sound.subject()) if each.state is not State.OK]
    assert bool(findings) == bool(words) and all(words in each.text for each in findings)


def test_a_disk_that_is_nearly_full_is_said(sound: Sound, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(sound.folder)
    monkeypatch.setattr(ledger.shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    found = only("disk", sound.subject())
    assert all(each.state is State.PROBLEM and "make room" in each.remedy for each in found)


def test_a_superuser_is_said(postgres_store: Engine) -> None:
    url = postgres_store.url.render_as_string(hide_password=False)
    subject = Examined(None, None, url, postgres_store, SystemClock(), {})
    (found,) = only("database-role", subject)
    assert found.state is State.WARNING and "is a superuser" in found.text
    late = subject._replace(clock=Ahead(60_000_000))
    assert any("60 s apart" in each.text or "59 s apart" in each.text for each in only("database-role", late))


def test_the_command_ends_with_1_where_something_is_a_problem(sound: Sound) -> None:
    file = sound.folder / "service.yaml"
    settings = settings_in(sound.folder)
    given = {
        name: str(getattr(settings, name)) for name in ("database_url", "state_path", "listen", "signing_key_path")
    }
    file.write_text(json.dumps(given))
    run = CliRunner().invoke(app, ["doctor", "--service", str(file), "--json"])
    assert run.exit_code == 0, run.output
    assert json.loads(run.stdout)["counts"]["problem"] == 0
    (sound.folder / "state").chmod(0o755)
    shown = CliRunner().invoke(app, ["doctor", "--service", str(file)])
    assert shown.exit_code == 1 and "chmod 700" in shown.stdout.replace("\n", " ")


def test_a_control_plane_that_does_not_answer_holds_it_up_for_a_moment_alone(
    sound: Sound, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte now and then is no answer. Control: with more time the whole answer is read."""
    ends = threading.Event()

    def drip(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while not ends.is_set():
                asked, _ = listener.accept()
                with asked, contextlib.suppress(OSError):
                    for byte in b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}":
                        asked.sendall(bytes([byte]))
                        if ends.wait(0.01):
                            break

    _plane(sound)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{sound.folder}/nobody.sock")
    listener.listen()
    thread = threading.Thread(target=drip, args=(listener,))
    thread.start()
    try:
        assert only("control-plane", sound.subject())[0].state is State.OK
        monkeypatch.setattr(worker, "_ANSWER_SECONDS", 0.3)  # a part comes in less
        [said] = only("control-plane", sound.subject())
        assert said.state is State.PROBLEM and "cannot be reached" in said.text
    finally:
        ends.set()
        listener.shutdown(socket.SHUT_RDWR)  # ends a wait in accept(); only then may it be closed
        thread.join()
        listener.close()


def test_nothing_is_changed(sound: Sound) -> None:
    def state() -> dict[str, tuple[int, int]]:
        files = (
            each for each in sound.folder.rglob("*") if each.is_file() and not each.name.endswith(("-shm", "-wal"))
        )
        return {str(each): (each.stat().st_mode, each.stat().st_size) for each in files}

    before = state()
    examine(sound.subject())
    assert state() == before


def test_settings_that_are_none_end_the_command(tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    file.write_text("lissten: unix:/x\n")
    run = CliRunner().invoke(app, ["doctor", "--service", str(file)])
    assert run.exit_code == 2 and "did you mean `listen`" in run.output


def test_a_service_raises_its_limit_of_files_or_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: what is enough stays as it is."""
    limits, raised = (1024, 4096), []
    monkeypatch.setattr(open_files.resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(open_files.resource, "setrlimit", lambda _, pair: raised.append(pair))
    open_files.allow_files(1000)
    assert raised == []
    open_files.allow_files(4000)
    assert raised == [(4000, 4096)]
    with pytest.raises(ConfigError, match="8000 files are needed, and this process may open 4096"):
        open_files.allow_files(8000)


def test_what_each_extra_lacks_is_said_with_the_command(sound: Sound, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a sound installation lacks nothing: the control."""
    monkeypatch.setattr(machine, "_version", lambda name: "1")
    assert [each.state for each in only("extras", sound.subject())] == [State.OK]
    absent = {"pyzmq", "nats-py", "kvcustody-testkit"}
    monkeypatch.setattr(machine, "_version", lambda name: None if name in absent else "1")
    said = {each.text: each.remedy for each in only("extras", sound.subject()) if each.state is State.OPTIONAL}
    assert said["extra `events` lacks pyzmq"] == "pip install 'kvcustody[events]'"
    assert said["extra `nats` lacks pyzmq, nats-py"] == "pip install 'kvcustody[nats]'"
    assert said["extra `testkit` lacks kvcustody-testkit"] == "in the checkout, pip install ./packaging/testkit"
    result = CliRunner().invoke(app, ["doctor"])
    assert "not installed: extra `events` lacks pyzmq: pip install 'kvcustody[events]'" in result.output
