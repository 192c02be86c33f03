"""Record an operator's act before it happens, from a process that is not a worker.

1. `record_operator_act` returned means committed; otherwise it raises `LedgerUnavailable` and the act must not happen
   (class A).
2. The process's own orderly end is on record behind the act.
3. Where orders are signed (`signed_orders`), one that this process cannot sign is refused, and then
   nothing is written.
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

from kvcustody.audit.evidence.subjects.subject_key_store import SubjectKeys
from kvcustody.audit.kinds import Event
from kvcustody.audit.store.database.signed_orders import check_orders, orders_of
from kvcustody.audit.write.event_writer import EventWriter
from kvcustody.clock import Clock, SystemClock

_TOGETHER = 1000  # acts that are waited for as long as one


def record_operator_act(
    engine: Engine,
    make: Callable[[int], Event],
    *,
    clock: Clock | None = None,
    subject_keys: SubjectKeys | None = None,
    clear_names: bool = False,
) -> None:
    """Commit the event that `make(at_us)` returns; `at_us` is the boot-time moment (rule 1).

    `subject_keys` and `clear_names` are for events that name a subject, as `EventWriter` takes them.
    """
    record_operator_acts(
        engine, lambda at_us: [make(at_us)], clock=clock, subject_keys=subject_keys, clear_names=clear_names
    )


def record_operator_acts(
    engine: Engine,
    make: Callable[[int], Sequence[Event]],
    *,
    clock: Clock | None = None,
    subject_keys: SubjectKeys | None = None,
    clear_names: bool = False,
) -> None:
    """Record several events of one act in few transactions; if it raises, some may be recorded."""
    clock = clock or SystemClock()
    acts = make(clock.now_us())
    if (orders := orders_of(engine)) is not None:
        check_orders(orders, acts)
    with recorder(engine, clock, subject_keys=subject_keys, clear_names=clear_names) as writer:
        decided = [threading.Event() for _ in acts]
        awaited = [writer.begin_durable(act, each.set) for act, each in zip(acts, decided, strict=True)]
        deadline = time.monotonic() + writer.durable_seconds * (1 + len(acts) // _TOGETHER)
        for each in decided:
            each.wait(max(0.0, deadline - time.monotonic()))
        for act in awaited:
            writer.end_durable(act)


@contextmanager
def recorder(
    engine: Engine,
    clock: Clock,
    prefix: str = "console",
    *,
    subject_keys: SubjectKeys | None = None,
    clear_names: bool = False,
) -> Iterator[EventWriter]:
    """Yield a writer with a name of its own for one act; it handles subjects' names like `EventWriter`."""
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
