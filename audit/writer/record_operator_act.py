"""Puts one act of an operator on record before it happens, from a process that is no worker.

1. `record_operator_act` returned means committed; otherwise it raises `LedgerUnavailable` and the act must not happen
   (class A).
2. The process's own orderly end is on record behind the act.
"""

from __future__ import annotations

import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Engine

from kvcustody.audit.events import Event
from kvcustody.audit.subjects.subject_key_store import SubjectKeys
from kvcustody.audit.writer.event_writer import EventWriter, LedgerWriter
from kvcustody.clock import Clock, SystemClock

_ACTS = 1000  # that are waited for as long as one


def record_operator_act(engine: Engine, make: Callable[[int], Event], *, clock: Clock | None = None) -> None:
    """Commit the event that `make(at_us)` gives; `at_us` is the boot-time moment (rule 1)."""
    clock = clock or SystemClock()
    with recorder(engine, clock) as writer:
        writer.submit_durable(make(clock.now_us()))


@contextmanager
def recorder(
    engine: Engine,
    clock: Clock,
    prefix: str = "console",
    *,
    subject_keys: SubjectKeys | None = None,
    clear_names: bool = False,
) -> Iterator[EventWriter]:
    """A writer of its own name, for as long as an act takes; subjects' names as `EventWriter` takes them."""
    with tempfile.TemporaryDirectory(prefix="kvcustody-record-") as folder:
        name = f"{prefix}-{uuid.uuid4().hex[:12]}"
        with EventWriter(
            engine,
            worker=name,
            clock=clock,
            spill_directory=Path(folder),
            subject_keys=subject_keys,
            clear_names=clear_names,
        ) as writer:
            yield writer


def submit_all_durable(writer: LedgerWriter, acts: Sequence[Event]) -> None:
    """Record class A events that one act stands on, as `submit_durable` does, with one wait and few transactions.

    Raises `LedgerUnavailable` where any of them is not committed: the act must not happen, though others may be.
    """
    decided = threading.Semaphore(0)
    awaited = [writer.begin_durable(act, decided.release) for act in acts]
    deadline = time.monotonic() + writer.durable_seconds * (1 + len(acts) // _ACTS)
    for _ in awaited:
        decided.acquire(timeout=max(0.0, deadline - time.monotonic()))
    for each in awaited:
        writer.end_durable(each)
