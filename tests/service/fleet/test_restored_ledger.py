"""A ledger that went back to an earlier state while workers go on: what they keep brings every leaf back, once."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from structlog.testing import capture_logs
from typer.testing import CliRunner

from kvcustody.audit.store.schema.ledger import events, incarnations, logs
from kvcustody.audit.tlog.log_break import recorded_breaks
from kvcustody.audit.tlog.proofs import ProofError
from kvcustody.audit.tlog.signing_key import SigningKey, read_signing_key
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.audit.write import spill_file
from kvcustody.audit.write.event_writer import WriterSettings
from kvcustody.clock import SystemClock
from kvcustody.console.main import app
from kvcustody.errors import ConfigError
from kvcustody.governance.control_plane import kept_batches
from kvcustody.governance.control_plane.connection import ControlPlaneConnection
from kvcustody.governance.control_plane.remote_ledger import RemoteLedger
from kvcustody.governance.keys.checkpoint_signing_key import memory_of
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.fleet import key_custody
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.governance.service.service import Service
from standins import LIBRARY
from standins.postgres import durable_server
from standins.service.service_world import Server, Worker

pytestmark = pytest.mark.system

SETTINGS = WriterSettings(interval_seconds=0.002, retry_seconds=0.02)
NEVER = 3600.0


class World:
    """A service whose database can be saved and put back, and a worker's ledger that goes on meanwhile."""

    def __init__(self, folder: Path, make_service: Any, make_people: Any, postgres: Any, seconds: float) -> None:
        self.folder = folder
        self._make, self._people, self.postgres = make_service, make_people, postgres
        self._seconds = seconds
        self.key = ""
        self.service: Service
        self.server: Server
        self.begin()
        self.sent = Worker("gpu-0")
        self.reached = 0

    @property
    def url(self) -> str:
        return str(self.postgres.get_uri().replace("/postgres?", "/live?"))

    def begin(self) -> None:
        more: dict[str, Any] = {"checkpoint_seconds": self._seconds}
        if self.postgres is not None:
            more |= {"database_url": self.url, "subject_keys_url": f"sqlite:///{self.folder}/people.db"}
        self.service = self._make(**more)
        self.server = Server(self.service)
        if not self.key:
            self.key = self._people(self.service).add("gpu-0", Role.WORKER)

    def end(self) -> None:
        self.server.close()
        self.service.close()

    def save(self) -> None:
        """A copy of the database, as a standby has it; the service rests meanwhile."""
        self.end()
        if self.postgres is None:
            source, copy = (sqlite3.connect(self.folder / name) for name in ("ledger.db", "copy.db"))
            source.backup(copy)
            source.close()
            copy.close()
        else:
            self._sql("CREATE DATABASE standby TEMPLATE live")
        self.begin()

    def fail_over(self) -> None:
        """The copy takes the database's place."""
        self.end()
        if self.postgres is None:
            for path in self.folder.glob("ledger.db*"):
                path.unlink()
            shutil.move(self.folder / "copy.db", self.folder / "ledger.db")
        else:
            self._sql("DROP DATABASE live WITH (FORCE)", "ALTER DATABASE standby RENAME TO live")
        self.begin()

    def _sql(self, *statements: str) -> None:
        import psycopg

        with psycopg.connect(self.postgres.get_uri(), autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement)

    def connection(self) -> ControlPlaneConnection:
        return Moving(self)

    def open(self, **more: Any) -> RemoteLedger:
        return RemoteLedger(
            self.connection(),
            worker="gpu-0",
            clock=SystemClock(),
            spill_directory=self.folder / "spill",
            settings=SETTINGS,
            **more,
        )

    def leaves(self) -> Counter[tuple[str, int, int, str]]:
        """Leaves of workers, by what makes each itself."""
        query = (
            select(incarnations.c.uuid, events.c.sequence, events.c.part, logs.c.name)
            .join(events, events.c.incarnation == incarnations.c.id)
            .join(logs, logs.c.id == events.c.log)
        )
        with self.service.reading() as connection:
            return Counter(tuple(row) for row in connection.execute(query))

    def of(self, ledger: RemoteLedger) -> set[int]:
        return {key[1] for key in self.leaves() if key[0] == ledger.incarnation}

    def kinds(self, kind: str) -> list[dict[str, Any]]:
        with self.service.reading() as connection:
            rows = connection.execute(select(events.c.leaf).where(events.c.kind == kind))
            return [json.loads(row.leaf) for row in rows]

    def kept(self) -> list[Path]:
        return [*(self.folder / "spill").glob("*.kept")]


class Moving(ControlPlaneConnection):
    """Follows a service that comes back at another port."""

    def __init__(self, world: World) -> None:
        self._world = world
        super().__init__(world.server.address, world.key)

    def request(self, method: str, path: str, **how: Any) -> Any:
        if self.server != self._world.server.address:
            super().close()
            super().__init__(self._world.server.address, self._world.key)
        return super().request(method, path, **how)


@pytest.fixture(params=["sqlite", "postgresql"])
def make_world(request: Any, tmp_path: Path, make_service: Any, make_people: Any) -> Iterator[Callable[[float], World]]:
    worlds: list[World] = []

    def make(seconds: float, postgres: Any = None) -> World:
        worlds.append(World(tmp_path, make_service, make_people, postgres, seconds))
        return worlds[-1]

    if request.param == "sqlite":
        yield make
    else:
        with durable_server() as server:
            import psycopg

            with psycopg.connect(server.get_uri(), autocommit=True) as connection:
                connection.execute("CREATE DATABASE live")
            yield lambda seconds: make(seconds, server)
            for world in worlds:
                world.end()
            worlds.clear()
    for world in worlds:
        world.end()


def work(world: World, ledger: RemoteLedger, requests: int = 20) -> None:
    for _ in range(requests):
        ledger.submit(world.sent.request("acme"))
    assert ledger.flush(20)


def whole(world: World, ledger: RemoteLedger, seconds: float = 30.0) -> None:
    """Every event up to now is there, once, after the worker has asked as its agent does."""
    end = time.monotonic() + seconds
    while True:
        ledger.check_kept()
        if ledger.flush(20) and ledger.status().healthy and world.of(ledger) >= set(range(1, world.reached)):
            break
        assert time.monotonic() < end, (ledger.status(), world.of(ledger))
        time.sleep(0.05)
    assert set(world.leaves().values()) == {1}


@pytest.mark.parametrize("signed", [True, False])
def test_what_a_failover_lost_is_handed_in_again_once(make_world: Any, signed: bool) -> None:
    world: World = make_world(0.02 if signed else NEVER)
    ledger = world.open()
    ledger.submit([world.sent.started()])
    work(world, ledger)
    world.save()
    work(world, ledger)
    before = world.of(ledger)
    world.fail_over()
    assert before - world.of(ledger), "control: without what is kept these are lost"
    work(world, ledger)
    world.reached = max(before) + 1
    whole(world, ledger)
    told = [leaf["cause"] for leaf in world.kinds("spill-started") if leaf["incarnation"] == ledger.incarnation]
    assert any("the ledger" in cause for cause in told), told
    assert world.kinds("replay-completed")[-1]["added"] > 0
    ledger.close()


@pytest.mark.parametrize("pins", [True, False], ids=["pinned", "control: no pin"])
def test_a_ledger_that_went_back_while_no_worker_ran_is_seen_by_the_next_process(make_world: Any, pins: bool) -> None:
    """Everything that this worker kept is signed, so no leaf of its own is missing: the pinned size alone tells."""
    world: World = make_world(NEVER)
    ledger = world.open()
    signed_and_kept(world, ledger)
    world.save()
    signed_and_kept(world, ledger)
    ledger.close()
    if not pins:
        (world.folder / "spill" / "signed-size").unlink()
    world.fail_over()
    ledger = world.open()
    with capture_logs() as logs:
        ledger.check_kept()
        assert ledger.flush(20)
        ledger.close()
    told = [entry["reason"] for entry in logs if "lost what it had acknowledged" in entry["event"]]
    assert [("had" in reason) for reason in told] == [True] * pins, told


def signed_and_kept(world: World, ledger: RemoteLedger) -> None:
    """The worker has worked, all of it is signed, and the worker has heard so."""
    work(world, ledger)
    assert world.service.signer is not None
    world.service.signer.sign_once()
    ledger.check_kept()
    assert not world.kept()


def test_what_is_signed_is_kept_no_longer_and_what_is_not_stays(make_world: Any) -> None:
    world: World = make_world(NEVER)
    ledger = world.open()
    work(world, ledger)
    ledger.check_kept()
    assert world.kept() and ledger.kept.size_bytes() > 0
    assert world.service.signer is not None
    world.service.signer.sign_once()
    ledger.check_kept()
    assert not world.kept(), "it is covered"
    assert ledger.status().healthy
    ledger.close()


def test_a_note_by_a_key_that_is_not_trusted_covers_nothing(make_world: Any) -> None:
    world: World = make_world(0.02)
    other = SigningKey.generate("kvcustody.example/ledger").verifier
    ours = read_signing_key(world.service.settings.signing_key_path).verifier
    ledger = world.open(trusted=(other,))
    work(world, ledger)
    assert world.service.signer is not None
    world.service.signer.sign_once()
    ledger.check_kept()
    assert world.kept() and ledger.unverified
    ledger.close()
    ledger = world.open(trusted=(ours,))
    for _ in range(100):
        world.service.signer.sign_once()
        ledger.check_kept()
        if not world.kept():
            break
        time.sleep(0.05)
    assert not world.kept() and not ledger.unverified, "control"
    ledger.close()


def test_what_is_kept_is_bounded_and_said(make_world: Any) -> None:
    world: World = make_world(NEVER)
    ledger = world.open(kept_bytes=20_000)
    for _ in range(60):
        work(world, ledger, 5)
        ledger.check_kept()
    assert 0 < ledger.kept.size_bytes() <= 20_000 and ledger.kept.dropped_bytes > 0
    ledger.close()


VICTIM = """
import sys, time
sys.path[:0] = sys.argv[4:]
from pathlib import Path
from standins.service.service_world import Worker
from kvcustody.clock import SystemClock
from kvcustody.audit.write.event_writer import WriterSettings
from kvcustody.governance.control_plane.connection import ControlPlaneConnection
from kvcustody.governance.control_plane.remote_ledger import RemoteLedger
address, key, folder = sys.argv[1:4]
ledger = RemoteLedger(ControlPlaneConnection(address, key), worker="gpu-0", clock=SystemClock(),
    spill_directory=Path(folder), settings=WriterSettings(interval_seconds=0.002))
made = Worker("gpu-0")
ledger.submit([made.started()])
while True:
    ledger.submit(made.request("acme"))
    if ledger.flush(5):
        print(ledger.incarnation, ledger.durable_sequence, flush=True)
"""


def test_what_a_killed_worker_kept_is_handed_in_by_its_successor(make_world: Any) -> None:
    world: World = make_world(NEVER)
    world.save()
    paths = [str(LIBRARY)]
    arguments = [world.server.address, world.key, str(world.folder / "spill"), *paths]
    process = subprocess.Popen(
        [sys.executable, "-c", VICTIM, *arguments], stdout=subprocess.PIPE, text=True, env={**os.environ}
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(50)]
    process.send_signal(signal.SIGKILL)
    process.wait()
    incarnation, reached = lines[-1].split()
    world.fail_over()
    assert incarnation not in {key[0] for key in world.leaves()}, "control: the ledger does not know it"
    ledger = world.open()
    end = time.monotonic() + 30
    wanted = set(range(1, int(reached) + 1))
    while not wanted <= {key[1] for key in world.leaves() if key[0] == incarnation}:
        assert time.monotonic() < end
        ledger.check_kept()
        assert ledger.flush(20)
        time.sleep(0.05)
    assert set(world.leaves().values()) == {1}
    ledger.close()


def test_a_custodian_confirms_a_break_while_the_service_runs(make_world: Any) -> None:
    world: World = make_world(0.02)
    ledger = world.open()
    work(world, ledger)
    world.save()
    work(world, ledger)
    with pytest.raises(ProblemError, match="does not record a break"):
        key_custody.confirm_break(world.service, "carl", "control: nothing is lost")
    assert world.service.signer is not None
    world.service.signer.sign_once()
    before = max(world.of(ledger))
    world.fail_over()
    world.reached = before + 1
    whole(world, ledger)
    signer = world.service.signer
    assert signer is not None
    with pytest.raises(ProofError):
        signer.sign_once()
    what = key_custody.confirm_break(world.service, "carl", "drill")
    assert what.lost.size > what.base.size and what.replayed > 0
    signer = world.service.signer
    signer.sign_once()
    assert not signer.contradiction()
    with world.service.reading() as connection:
        assert [one.actor for one in recorded_breaks(connection)] == ["carl"]
    ledger.close()


def test_on_a_full_disk_what_is_kept_makes_room_for_new_evidence(
    make_world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk of a size: the ledger has what is kept already, and what is spilled is nowhere else."""
    world: World = make_world(NEVER)
    ledger = world.open()
    for _ in range(3):
        work(world, ledger)
        ledger.kept.closed()  # a file each
    assert len(world.kept()) == 3
    size_bytes = sum(path.stat().st_size for path in (world.folder / "spill").iterdir()) + 64
    monkeypatch.setattr(spill_file, "_write", on_a_disk_of(size_bytes, world.folder / "spill"))
    world.end()
    ledger.submit(world.sent.request("acme"))
    assert ledger.flush(20) is True and ledger.admitting
    assert len(world.kept()) < 3 and ledger.kept.dropped_bytes > 0
    assert ledger.status().spilled_bytes > 0
    for _ in range(300):  # control: where nothing is kept any more nothing new is admitted
        if not ledger.admitting:
            break
        ledger.submit(world.sent.request("acme"))
        ledger.flush(1)
    assert not ledger.admitting and not world.kept()
    monkeypatch.undo()
    world.begin()
    ledger.close()


def test_what_is_kept_is_synced_in_groups_and_whenever_it_is_asked_about(
    make_world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world: World = make_world(NEVER)
    synced: list[str] = []
    fsync = os.fsync

    def told(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", told)
    monkeypatch.setattr(kept_batches, "_SYNC_SECONDS", 3600.0)
    ledger = world.open()
    work(world, ledger)
    synced.clear()
    work(world, ledger)
    work(world, ledger)
    assert not [path for path in synced if path.endswith(".kept")], "control: not one for each batch"
    ledger.kept.closed()
    assert [path for path in synced if path.endswith(".kept")]
    synced.clear()
    monkeypatch.setattr(kept_batches, "_SYNC_SECONDS", 0.0)
    work(world, ledger)
    assert [path for path in synced if path.endswith(".kept")]
    ledger.close()


def on_a_disk_of(size_bytes: int, folder: Path) -> Callable[..., None]:
    """How a spill writes where the disk has no more than so much for a folder."""
    write = spill_file._write

    def limited(descriptor: int, data: bytes, *, durable: bool = True) -> None:
        if sum(path.stat().st_size for path in folder.iterdir()) + len(data) > size_bytes:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(descriptor, data, durable=durable)

    return limited


def test_signing_goes_on_after_a_lost_signature_by_a_confirmed_act_alone(make_world: Any) -> None:
    """The tree that replay brings back is another: the signer refuses it until the break is on record, and says so."""
    world: World = make_world(0.02)
    ledger = world.open()
    work(world, ledger)
    world.save()
    work(world, ledger)
    signer = world.service.signer
    assert signer is not None
    signer.sign_once()
    key = world.service.settings.signing_key_path
    lost, before = memory_of(key).read_bytes(), max(world.of(ledger))
    world.fail_over()
    world.reached = before + 1
    whole(world, ledger)
    signer = world.service.signer
    assert signer is not None
    with pytest.raises(ProofError):
        signer.sign_once()
    assert ledger.flush(20)
    ledger.close()
    world.end()
    place = str(world.folder / "ledger.db") if world.postgres is None else world.url
    command = [
        "audit",
        "confirm-break",
        "--signing-key",
        str(key),
        "--actor",
        "ops",
        "--reason",
        "drill",
        "--ledger",
        place,
    ]
    done = CliRunner().invoke(app, command)
    assert "replayed since" in done.output, done.output
    again = CliRunner().invoke(app, command)
    assert again.exit_code and isinstance(again.exception, (ConfigError, SystemExit)), "control: no break is left"
    world.begin()
    signer = world.service.signer
    assert signer is not None and not signer.contradiction()
    vkey = read_signing_key(key).verifier
    with world.service.reading() as connection:
        sound = fsck(connection, keys=[vkey])
        assert sound.ok and any("the root log broke" in what for what in sound.remarks), sound
        report = fsck(connection, keys=[vkey], kept=[lost])
        [problem] = report.problems
        assert "lost by the break" in problem.what
        other = SigningKey.generate(vkey.name).verifier
        assert any("break" in found.what for found in fsck(connection, keys=[other]).problems), "control"
    world.end()
    folder, public = str(world.folder / "evidence"), str(vkey)
    exported = CliRunner().invoke(app, ["audit", "export", folder, "--ledger", place])
    assert not exported.exit_code, exported.output
    shown = CliRunner().invoke(app, ["audit", "verify", folder, "--key", public])
    assert not shown.exit_code and "the log broke" in shown.output, shown.output
