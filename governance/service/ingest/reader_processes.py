"""Processes that parse workers' batches: checks run there, beside the commits.

Reading takes as long as committing, and both need the interpreter: in one process they wait for each other.
1. What comes back is what `read_batch` gives here. A batch that the other process does not accept is read here, which
   shows what is wrong with it. Small batches are read here too, and so are batches that wait for another process in
   vain. Where no such process exists (yet), all are.
2. A process that ends, or that is silent for too long, costs time, never a batch. It is started again, not at once.
3. The other process ends with its parent, however that ends: its standard input does.
4. It knows no key, no database and no address: bytes come in, and what they say goes out.
"""

from __future__ import annotations

import marshal
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import IO, Any

from kvcustody.audit.leaf.batch import IncarnationStart, LeafBatch, LeafGroup
from kvcustody.audit.leaf.block_run_text import Extents
from kvcustody.governance.service.gc_tuning import gc_seldom
from kvcustody.governance.service.ingest.check_leaves import Received, Sender, lines_of, read_batch
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.governance.service.processes.pipes import (
    end_process,
    is_there,
    length,
    read_part,
    receive,
    send,
    start_module,
)
from kvcustody.logger import get_logger

SMALL_BYTES = 64 << 10  # a batch of some hundred leaves: sooner read than sent
_SILENT_SECONDS = 30.0
_PATIENCE_SECONDS = 5.0  # for one of the processes
_AGAIN_SECONDS = 10.0
_READY = b"ready"


class BatchReaders:
    """Processes that parse batches; the first one starts with the first large batch."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._idle: SimpleQueue[_Process] = SimpleQueue()
        for _ in range(count):
            self._idle.put(_Process())

    def read(self, body: bytes, sender: Sender) -> Received | None:
        """Return the batch in a request; None where it must be parsed here (rule 1)."""
        if len(body) < SMALL_BYTES:
            return None
        try:
            process = self._idle.get(timeout=_PATIENCE_SECONDS) if self._count else None
        except Empty:
            return None
        if process is None:
            return None
        try:
            found = process.ask(body, sender)
        finally:
            self._idle.put(process)
        return None if found is None else _received(found, body)

    def close(self) -> None:
        """End idle processes; busy ones end with this process."""
        while True:
            try:
                self._idle.get_nowait().end()
            except Empty:
                return


class _Process:
    """One other process, of one caller at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._begin_at = 0.0

    def ask(self, body: bytes, sender: Sender) -> bytes | None:
        """Its answer; None where it gives none, or is not there yet."""
        if self._process is None:
            self._begin()
            return None
        until = time.monotonic() + _SILENT_SECONDS
        try:
            if not self._ready:
                if not is_there(self._process, select.POLLIN, 0.0):
                    return None  # it is still loading what it needs
                self._ready = receive(self._process, until) == _READY
            head = marshal.dumps(tuple(sender))
            send(self._process, b"".join((length(head), head, length(body), body)), until)
            return receive(self._process, until) or None
        except (OSError, EOFError) as problem:
            get_logger(__name__).warning("a process that reads batches ended", why=repr(problem))
            self.end()
            return None

    def end(self) -> None:
        """End it; the next that is asked for is begun later (rule 2)."""
        process, self._process, self._ready = self._process, None, False
        if process is not None:
            end_process(process)
            self._begin_at = time.monotonic() + _AGAIN_SECONDS

    def _begin(self) -> None:
        if time.monotonic() < self._begin_at or not sys.executable:
            return
        self._begin_at = time.monotonic() + _AGAIN_SECONDS
        try:
            self._process = start_module("kvcustody.governance.service.ingest.reader_processes")
        except OSError as problem:
            get_logger(__name__).warning("no process to read batches", why=str(problem))
            return


def _told(received: Received) -> bytes:
    """A batch as bytes, without those of its leaves, which its reader has."""
    batch = received.batch
    groups = [
        (
            group.kind,
            list(group.places),
            {key: list(column) for key, column in group.columns.items()},
            {key: tuple(extents) for key, extents in group.extents.items()},
        )
        for group in batch.groups
    ]
    founders = {uuid: tuple(founder) for uuid, founder in batch.founders.items()}
    columns: list[Sequence[Any]] = [list(column) for column in batch[:8]]
    return marshal.dumps((received.names, columns, groups, founders, list(batch.hashes), *received[2:]))


def _received(data: bytes, body: bytes) -> Received:
    """What `_told` told of the batch in this request."""
    names, columns, groups, founders, hashes, first, last = marshal.loads(data)  # noqa: S302 - of our own process
    _, lines = lines_of(body)
    made = [
        LeafGroup(kind, places, values, {key: Extents(*lists) for key, lists in extents.items()})
        for kind, places, values, extents in groups
    ]
    lives = {uuid: IncarnationStart(*founder) for uuid, founder in founders.items()}
    return Received(names, LeafBatch._make((*columns, lines, made, lives, hashes)), first, last)


def main() -> None:
    """Parse one batch after the other until standard input ends."""
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else is printed is no answer
    with gc_seldom():  # the lists of a thousand leaves are no cycles
        _answer(sys.stdin.buffer, sink)


def _answer(source: IO[bytes], sink: IO[bytes]) -> None:
    answer = _READY
    while True:
        sink.write(length(answer) + answer)
        sink.flush()
        try:
            sender = Sender(*marshal.loads(read_part(source)))  # noqa: S302 - of our parent
            body = read_part(source)
        except EOFError:
            return
        try:
            answer = _told(read_batch(body, sender))
        except ProblemError:
            answer = b""  # the parent finds out which


if __name__ == "__main__":
    main()
