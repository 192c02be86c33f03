"""Batches read by another process: the same taken, refused and lost as here, whatever becomes of it (A1 to A4)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from kvcustody.audit.evidence.subjects.subject_table import committed_name
from kvcustody.governance.service.ingest import ingest, reader_processes
from kvcustody.governance.service.ingest.check_leaves import Received, Sender, read_batch
from kvcustody.governance.service.ingest.reader_processes import BatchReaders
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.governance.service.processes import pipes
from standins.service.service_world import OFFSET_US, Worker, register, ship
from standins.waiting import until

WAIT_SECONDS = 60.0


def made(requests: int = 40) -> tuple[bytes, Sender]:
    """A batch of several kinds, and who sends it."""
    worker = Worker()
    events = [worker.started()]
    for number in range(requests):
        events += worker.request(("acme", "labs")[number % 2], f"user-{number}")
    sender = Sender("worker", worker.incarnation, OFFSET_US)
    return worker.batch(events).body, sender


def as_told(found: Received) -> tuple[bytes, list[bytes]]:
    return reader_processes._told(found), list(found.batch.data)


def process_of(readers: BatchReaders) -> subprocess.Popen[bytes]:
    idle = readers._idle.get_nowait()
    readers._idle.put(idle)
    assert idle._process is not None
    return idle._process


@pytest.fixture(scope="module")
def at_once() -> Iterator[pytest.MonkeyPatch]:
    """Small batches go to the other process too, and one that ended is begun again at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader_processes, "SMALL_BYTES", 0)
        patch.setattr(reader_processes, "_AGAIN_SECONDS", 0.0)
        yield patch


@pytest.fixture(scope="module")
def readers(at_once: pytest.MonkeyPatch) -> Iterator[BatchReaders]:
    opened = BatchReaders(1)
    until(lambda: opened.read(*made(1)))
    yield opened
    opened.close()


@pytest.mark.parametrize("requests", [1, 40, 400])
def test_what_another_process_reads_is_what_is_read_here(readers: BatchReaders, requests: int) -> None:
    body, sender = made(requests)
    found = readers.read(body, sender)
    assert found is not None and len(found.batch.data) > requests
    assert as_told(found) == as_told(read_batch(body, sender))


def test_a_batch_of_names_alone_is_read_too(readers: BatchReaders) -> None:
    secret = "ab" * 16
    body = orjson.dumps([[committed_name(secret, "acme", "user-1", ""), "acme", "user-1", "", secret]])
    found = readers.read(body, made(1)[1])
    assert found is not None and len(found.names) == 1
    assert as_told(found) == as_told(read_batch(body, made(1)[1]))


def test_what_it_refuses_is_left_to_be_refused_here(readers: BatchReaders) -> None:
    body, sender = made()
    for forged in (
        body.replace(b'"tenant":"acme"', b'"tenant":"labs"', 1),
        body.replace(b":", b": ", 1),
        b"\x00",
        b"[1]\n" + body.partition(b"\n")[2],
    ):
        assert readers.read(forged, sender) is None
        with pytest.raises(ProblemError):
            read_batch(forged, sender)
    assert readers.read(body, sender._replace(incarnation="cd" * 16)) is None, "another's leaves"
    assert readers.read(body, sender) is not None, "it has not ended for that (control)"


def test_one_that_was_killed_costs_no_batch_and_is_begun_again(readers: BatchReaders) -> None:
    body, sender = made()
    process = process_of(readers)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(WAIT_SECONDS)
    assert readers.read(body, sender) is None
    found = until(lambda: readers.read(body, sender))
    assert as_told(found) == as_told(read_batch(body, sender))
    assert process_of(readers).pid != process.pid


@pytest.mark.system("a reader process that hangs stalls the service")
@pytest.mark.parametrize("requests", [40, 1500])  # the larger batch does not fit into the pipe
def test_one_that_is_silent_is_not_waited_for(
    readers: BatchReaders, monkeypatch: pytest.MonkeyPatch, requests: int
) -> None:
    body, sender = made(requests)
    assert (len(body) > pipes.PIPE_BYTES) == (requests == 1500)
    process = process_of(readers)
    os.kill(process.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(reader_processes, "_SILENT_SECONDS", 0.2)
        assert readers.read(body, sender) is None
    assert process.wait(WAIT_SECONDS) == -signal.SIGKILL
    assert until(lambda: readers.read(body, sender)) is not None


def test_none_is_begun_for_small_batches_or_where_none_is_wanted() -> None:
    body, sender = made(1)
    assert len(body) < reader_processes.SMALL_BYTES or reader_processes.SMALL_BYTES == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader_processes, "SMALL_BYTES", len(body) + 1)
        few = BatchReaders(1)
        assert few.read(body, sender) is None
        assert few._idle.get_nowait()._process is None
    assert BatchReaders(0).read(*made(400)) is None


_PARENT = """
import sys, time
from kvcustody.governance.service.ingest import reader_processes
process = reader_processes._Process()
process._begin()
print(process._process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_it_ends_with_its_parent_and_was_told_no_secret() -> None:
    """The parent is killed, which tells its children nothing."""
    environment = {**os.environ, "KVCUSTODY_SERVICE_DATABASE_URL": "postgresql://u:hidden@h/x"}
    command = [sys.executable, "-c", _PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        folder = Path("/proc") / parent.stdout.readline().strip()
        until(lambda: b"reader_processes" in (folder / "cmdline").read_bytes())
        assert b"hidden" in Path(f"/proc/{parent.pid}/environ").read_bytes(), "there was one to tell (control)"
        assert b"hidden" not in (folder / "environ").read_bytes()
        parent.kill()

    def ended() -> bool:
        try:
            return b"reader_processes" not in (folder / "cmdline").read_bytes()
        except OSError:
            return True

    until(ended)


def test_the_service_takes_what_another_process_read(
    service: Any, client: Any, people: Any, at_once: pytest.MonkeyPatch
) -> None:
    """The service itself reads nothing of it: with that forbidden a batch is stored; without a process it is not."""

    def forbidden(*_: Any) -> Received:
        raise ProblemError("refused-leaf", "read here")

    worker = Worker()
    register(client, people["worker"], worker)
    service.ingest._readers = BatchReaders(1)
    try:
        until(lambda: service.ingest._readers.read(*made(1)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ingest, "read_batch", forbidden)
            answer = ship(client, people["worker"], worker, worker.batch([worker.started()]))
            assert (answer.status_code, answer.json()["added"]) == (200, 1)
            service.ingest._readers.close()
            service.ingest._readers = BatchReaders(0)
            answer = ship(client, people["worker"], worker, worker.batch(worker.request("acme")))
            assert answer.json()["type"].endswith("refused-leaf")
    finally:
        service.ingest._readers.close()
        service.ingest._readers = BatchReaders(0)
