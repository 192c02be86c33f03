"""Graphs recorded while other threads scrub, tick and erase: each recording is whole, and no replay scrubs anything."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from gpu.report import Report
from gpu.stages.ordering import fill
from kvcustody.allocator.pool.stream_memory import StreamTensorMemory
from kvcustody.errors import DeviceError
from kvcustody.kernels.segment import SegmentTable
from kvcustody.kernels.streams import capturing, outside_captures

WRITTEN = 0xCD


class Custody:
    """Threads that scrub, tick and erase blocks of their own until told to stop."""

    def __init__(self, memory: StreamTensorMemory, shares: list[np.ndarray]) -> None:
        self._memory, self._over = memory, threading.Event()
        self.turns = {"scrub": 0, "tick": 0, "erase": 0}
        self.answers: list[tuple[int, Any]] = []
        self.raised: list[BaseException] = []
        scrub, erase = shares
        work: dict[str, Callable[[], None]] = {
            "scrub": lambda: self._launch(scrub, wait=False),
            "tick": lambda: self.answers.extend(memory.answered(wait=False)),
            "erase": lambda: self._launch(erase, wait=True),
        }
        self._threads = [threading.Thread(target=self._loop, args=one, daemon=True) for one in work.items()]

    def __enter__(self) -> Custody:
        for one in self._threads:
            one.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for one in self._threads:
            one.join(30)

    def _launch(self, blocks: np.ndarray, *, wait: bool) -> None:
        self._memory.used()
        self._memory.launch(0, blocks, 1.0)
        if wait:
            self.answers.extend(self._memory.answered(wait=True))

    def _loop(self, name: str, work: Callable[[], None]) -> None:
        try:
            while not self._over.is_set():
                with outside_captures():
                    work()
                self.turns[name] += 1
                time.sleep(0.0005)
        except BaseException as error:
            self.raised.append(error)


def run(report: Report, lab: Any) -> None:
    """Record, replay and look, again and again."""
    blocks = 48
    tensors = [lab.tensor(blocks, lab.size(16 << 10, 64)) for _ in range(2)]
    memory = StreamTensorMemory([SegmentTable.from_tensors(tensors)], streams=streams(lab))
    memory.prepare(None)
    graph_writes, shares = np.arange(0, 8), [np.arange(16, 32), np.arange(32, 48)]
    index = lab.index(graph_writes)
    fill(tensors, index, 0)
    lab.synchronize()
    graphs = []
    with Custody(memory, shares) as custody:
        for _ in range(lab.size(50, 6)):
            with capturing(), lab.capture() as graph:
                lab.engine("write", lambda: fill(tensors, index, WRITTEN), memory.tables[0], graph_writes)
            graphs.append(graph)
            until = {name: turns + 1 for name, turns in custody.turns.items()}
            wait_for(lambda until=until: custody.raised or all(custody.turns[one] >= until[one] for one in until))
    report.check("no thread was refused anything", not custody.raised, "; ".join(map(repr, custody.raised))[:300])
    lab.synchronize()
    custody.answers.extend(memory.answered(wait=True))
    dirty = sum(len(result.failed) for _, result in custody.answers)
    launches = custody.turns["scrub"] + custody.turns["erase"]
    exact = len(custody.answers) == launches and not dirty
    report.check("each scrub of another thread has one receipt, and is zero", exact, launches=launches, dirty=dirty)
    fill(tensors, lab.index(np.arange(8, 48)), 0xFF)
    wrong = 0
    for graph in graphs:
        fill(tensors, index, 0)
        lab.synchronize()
        lab.replay(graph)
        lab.synchronize()
        wrong += any(int(one[:8].min()) != WRITTEN or int(one[8:].min()) != 0xFF for one in tensors)
    report.check("a replay writes what was recorded, and zeroes nothing", not wrong, graphs=len(graphs), wrong=wrong)
    report.check("a scrub in the midst of a recording is refused", refused(lab, memory, shares[0]))
    report.control(
        "what does not wait its turn breaks the recording or is refused", breaks(lab, tensors, index, memory)
    )


def streams(lab: Any) -> Any:
    """As `StreamTensorMemory` takes them."""
    found = lab.streams()
    return None if found is None else [found]


def refused(lab: Any, memory: StreamTensorMemory, blocks: np.ndarray) -> bool:
    """The caller's own stream records."""
    try:
        with capturing(), lab.capture():
            try:
                memory.launch(0, blocks, 0.0)
            except DeviceError:
                return True
    except RuntimeError:  # a recording of nothing may be refused at its end
        pass
    return False


def breaks(lab: Any, tensors: Any, index: Any, memory: StreamTensorMemory) -> bool:
    """Another thread waits for the device while this one records, and nobody keeps them apart."""
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            lab.synchronize()
        except RuntimeError as error:
            errors.append(error)

    try:
        with lab.capture():
            lab.engine("write", lambda: fill(tensors, index, WRITTEN), memory.tables[0], range(8))
            thread = threading.Thread(target=wait)
            thread.start()
            thread.join(30)
    except RuntimeError as error:
        errors.append(error)
    return bool(errors)


def wait_for(done: Callable[[], Any], seconds: float = 30.0) -> None:
    """Until every thread had a turn between two recordings."""
    until = time.monotonic() + seconds
    while not done() and time.monotonic() < until:
        time.sleep(0.001)
