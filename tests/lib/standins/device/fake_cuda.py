"""A simulated CUDA device: streams, events, graphs, pinned memory and kernels' byte ranges, with detection of races.

    with fake_cuda() as device:                  # our launches go through Triton's own dispatch into it
        memory = StreamTensorMemory([table], streams=[device])
        device.op(0, "forward", writes=rows)     # the engine's kernel on its stream
    assert not device.races

1. A race is found from the order of operations, not by luck. Every operation has a vector clock, by stream and host
   thread. Two accesses to one byte, of which one writes, must be ordered by stream order, an event, or a wait of the
   host.
2. Operations really run, but later, in any interleaving that the waits allow (`advance`, `drain`). A scrub runs tile by
   tile, so bytes can be inspected.
3. Pinned memory is read when the kernel runs, pageable memory when the copy is called. Memory that is freed is
   allocated again at once to the stream that had it.
4. While a stream records a graph, its operations are kept, not run. A stream that waits for an event of a recording is
   drawn into the recording. A host that waits for such an event, or for the device, is refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from kvcustody.kernels.entry import FAULT, READ_BACK, blocks_of, position_of
from kvcustody.kernels.launch import INTERPRETED
from kvcustody.kernels.segment import SegmentTable
from standins.device.fake_triton import fake_triton

Range = tuple[int, int]
Clock = dict[str, int]
_CAPTURED = "CUDA error: operation not permitted when stream is capturing"
_ISOLATED = "CUDA error: dependency created on uncaptured work in another stream"


class Race(NamedTuple):
    """Two accesses of the same bytes, one of them a write, that nothing orders."""

    first: str
    second: str
    at: int


class _Access(NamedTuple):
    start: int
    end: int
    writes: bool
    who: str
    epoch: int
    name: str


class _Op:
    """Work on a stream: steps that run one at a time, or a mark."""

    __slots__ = ("event", "name", "reads", "steps", "version", "writes")

    def __init__(
        self, name: str, steps: Iterable[Callable[[], None]] = (), event: Any = None, version: int = 0
    ) -> None:
        self.name, self.steps = name, deque(steps)
        self.event, self.version = event, version
        self.reads: list[Range] = []
        self.writes: list[Range] = []


class FakeEvent:
    """`torch.cuda.Event`."""

    def __init__(self, device: FakeCuda) -> None:
        self._device = device
        self.version = self.reached = 0
        self.clock: Clock = {}
        self.graph: Graph | None = None

    def record(self, stream: int | None = None) -> None:
        self._device._record(self, self._device.current() if stream is None else stream)

    def query(self) -> bool:
        self._refuse_in_capture()
        if self.reached < self.version:
            return False
        self._device._join_host(self.clock)
        return True

    def synchronize(self) -> None:
        self._refuse_in_capture()
        self._device.host_waits += 1
        while self.reached < self.version:
            assert self._device.advance(), "a wait that can never end"
        self._device._join_host(self.clock)

    def _refuse_in_capture(self) -> None:
        if self.graph is not None and self.graph.is_open:
            raise RuntimeError(_CAPTURED)


class Graph:
    """What streams recorded: run by `replay`, as often as it is called."""

    def __init__(self) -> None:
        self.is_open = True
        self.recorded: list[tuple[str, Callable[[], Iterable[Callable[[], None]]], list[Range], list[Range]]] = []

    @property
    def names(self) -> list[str]:
        return [name for name, _, _, _ in self.recorded]


class FakeCuda:
    """Streams 0 (the engine's) and up. `races` are found as work is put on a stream."""

    def __init__(self, seed: int = 0) -> None:
        self.races: list[Race] = []
        self.host_waits = 0
        self.stuck: set[int] = set()  # addresses of bytes that do not become zero
        self._random = random.Random(seed)
        self._queues: dict[int, deque[_Op]] = {0: deque()}
        self._clocks: dict[str, Clock] = {}
        self._captures: dict[int, Graph] = {}
        self._accesses: list[_Access] = []
        self._free: dict[int, list[torch.Tensor]] = {}
        self._lock = threading.RLock()
        self._here = threading.local()

    # -- what kernels.streams.Streams asks ---------------------------------------------------------------------------

    def side(self) -> int:
        self._queues[len(self._queues)] = deque()
        return len(self._queues) - 1

    def current(self) -> int:
        return int(getattr(self._here, "stream", 0))

    def event(self) -> FakeEvent:
        return FakeEvent(self)

    def run(self, stream: int, work: Callable[..., None], *, by_handle: bool | None = None) -> None:
        """`work` by handle launches kernels, whose bytes are known; any other is one piece of unknown bytes."""
        if by_handle and not INTERPRETED:
            work(stream)
            return
        self.op(stream, "work", act=work if by_handle is None else lambda: work(stream))

    def wait(self, stream: int, event: FakeEvent) -> None:
        with self._lock:
            graph = self._captures.get(stream)
            if event.graph is not None and event.graph.is_open:
                self._captures[stream] = event.graph  # drawn into the recording
                self._join(f"stream {stream}", event.clock)
                return
            if graph is not None and event.version:
                raise RuntimeError(_ISOLATED)
            self._join(f"stream {stream}", event.clock)
            self._queues[stream].append(_Op("wait", event=event, version=event.version))

    def is_capturing(self) -> bool:
        return self.current() in self._captures

    # -- the engine ---------------------------------------------------------------------------------------------------

    def op(
        self,
        stream: int,
        name: str,
        *,
        reads: Iterable[Range] = (),
        writes: Iterable[Range] = (),
        act: Callable[[], Any] | None = None,
    ) -> None:
        """A kernel of the engine: what it reads and writes, and what it does when it runs."""
        self._put(stream, name, list(reads), list(writes), lambda: [act] if act is not None else [])

    def host(self, name: str, *, reads: Iterable[Range] = (), writes: Iterable[Range] = ()) -> None:
        """The calling thread reads or writes memory that kernels reach too."""
        with self._lock:
            who = self._host()
            own = self._clocks.setdefault(who, {})
            own[who] = own.get(who, 0) + 1
            self._note(who, name, list(reads), list(writes))

    def copy_to_device(self, stream: int, source: torch.Tensor, target: torch.Tensor, *, pinned: bool) -> None:
        """`target.copy_(source, non_blocking=True)`: pageable sources are read now, pinned ones when it runs."""
        kept = source if pinned else source.clone()
        if pinned:
            self.host("fill", writes=[ranges_of(source)])
        reads = [ranges_of(source)] if pinned else []
        self.op(stream, "copy", reads=reads, writes=[ranges_of(target)], act=lambda: target.copy_(kept))

    def allocate(self, stream: int, size: int) -> torch.Tensor:
        """From the caching allocator: what the same stream gave back, if there is any."""
        kept = self._free.setdefault(stream, [])
        for at, tensor in enumerate(kept):
            if tensor.numel() >= size:
                return kept.pop(at)[:size]
        return torch.empty(size, dtype=torch.uint8)

    def give_back(self, stream: int, tensor: torch.Tensor) -> None:
        """The allocator hands it out again to `stream`, without a wait."""
        self._free.setdefault(stream, []).append(tensor)

    def synchronize(self) -> None:
        """The host waits for everything; refused while anything is recorded."""
        if self._captures:
            raise RuntimeError(_CAPTURED)
        self.drain()
        for clock in list(self._clocks.values()):
            self._join_host(clock)

    @contextlib.contextmanager
    def capture(self, stream: int) -> Iterator[Graph]:
        """`torch.cuda.graph`: what is put on `stream`, or on one that waits for it, is recorded."""
        graph = Graph()
        before = getattr(self._here, "stream", 0)
        self._captures[stream], self._here.stream = graph, stream
        try:
            yield graph
        finally:
            graph.is_open = False
            self._here.stream = before
            self._captures = {one: other for one, other in self._captures.items() if other is not graph}

    def waiting(self, stream: int) -> list[str]:
        """What a stream still has to do: names of operations, `wait` and `record`."""
        return [op.name for op in self._queues[stream]]

    def replay(self, stream: int, graph: Graph) -> None:
        """Run what was recorded, again."""
        for name, steps, reads, writes in graph.recorded:
            self._put(stream, name, reads, writes, steps)

    # -- running ------------------------------------------------------------------------------------------------------

    def advance(self) -> bool:
        """One step of one ready stream; False when nothing can go on."""
        ready = [
            stream
            for stream, queue in self._queues.items()
            if queue and (queue[0].name != "wait" or queue[0].event.reached >= queue[0].version)
        ]
        if not ready:
            assert not any(self._queues.values()), "the streams wait for each other"
            return False
        queue = self._queues[self._random.choice(ready)]
        op = queue[0]
        if op.steps:
            op.steps.popleft()()
        if not op.steps:
            queue.popleft()
            if op.name == "record":
                op.event.reached = max(op.event.reached, op.version)
        return True

    def drain(self) -> None:
        """Run everything."""
        while self.advance():
            pass

    # -- order --------------------------------------------------------------------------------------------------------

    def _put(
        self,
        stream: int,
        name: str,
        reads: list[Range],
        writes: list[Range],
        steps: Callable[[], Iterable[Callable[[], None]]],
    ) -> None:
        with self._lock:
            graph = self._captures.get(stream)
            if graph is not None:
                graph.recorded.append((name, steps, reads, writes))
                return
            who = f"stream {stream}"
            self._join(who, self._clocks.get(self._host(), {}))
            self._clocks[who][who] = self._clocks[who].get(who, 0) + 1
            self._note(who, name, reads, writes)
            self._queues[stream].append(_Op(name, steps()))

    def _note(self, who: str, name: str, reads: list[Range], writes: list[Range]) -> None:
        now, epoch = self._clocks[who], self._clocks[who][who]
        for ranges, is_write in ((reads, False), (writes, True)):
            for start, end in ranges:
                for one in self._accesses:
                    meets = one.start < end and start < one.end and (is_write or one.writes)
                    if meets and one.who != who and now.get(one.who, 0) < one.epoch:
                        at = max(start, one.start)
                        self.races.append(Race(f"{one.name} on {one.who}", f"{name} on {who}", at))
        for ranges, is_write in ((reads, False), (writes, True)):
            for start, end in ranges:
                if is_write:
                    self._accesses = [
                        one
                        for one in self._accesses
                        if not (start <= one.start and one.end <= end and now.get(one.who, 0) >= one.epoch)
                    ]
                self._accesses.append(_Access(start, end, is_write, who, epoch, name))

    def _record(self, event: FakeEvent, stream: int) -> None:
        with self._lock:
            event.graph = self._captures.get(stream)
            event.version += 1
            who = f"stream {stream}"
            self._join(who, self._clocks.get(self._host(), {}))
            event.clock = dict(self._clocks[who])
            if event.graph is None:
                self._queues[stream].append(_Op("record", event=event, version=event.version))

    def _join(self, who: str, clock: Clock) -> None:
        own = self._clocks.setdefault(who, {})
        for other, epoch in clock.items():
            own[other] = max(own.get(other, 0), epoch)

    def _join_host(self, clock: Clock) -> None:
        with self._lock:
            self._join(self._host(), clock)

    def _host(self) -> str:
        return f"host thread {threading.get_ident()}"

    # -- our kernels, as Triton launches them -------------------------------------------------------------------------

    def launched(self, name: str, programs: int, stream: int, arguments: tuple[Any, ...]) -> None:
        """The driver's side of a launch."""
        getattr(self, f"_{name}")(self.current() if stream == _NO_STREAM else stream, arguments)

    def _scrub_kernel(self, stream: int, arguments: tuple[Any, ...]) -> None:
        entries, address, stride, size, tally, published, flags, blocks, tiles, _, *constants = arguments
        read_back = bool(constants[3])
        faulty = bool(constants[4])
        named = [entry for entry in entries.tolist() if _inside(entry, blocks)]
        writes = [
            (int(address[tile]) + first * int(stride[tile]), count * int(size[tile]))
            for entry in named
            for first, count in [_run(entry)]
            for tile in range(tiles)
        ]
        shared = [ranges_of(entries), *([ranges_of(flags)] if read_back else [])]
        self.host("work list", writes=shared)
        signals = [ranges_of(published)] + ([ranges_of(flags)] if read_back else [])

        def steps() -> Iterator[Callable[[], None]]:
            for at in range(len(entries)):
                for tile in range(tiles):
                    yield lambda at=at, tile=tile: zero(at, tile)
            yield lambda: published.fill_(int(tally[0]))

        def zero(at: int, tile: int) -> None:
            entry = int(entries[at])  # in pinned memory: as it is now
            if not _inside(entry, blocks):
                return
            first, count = _run(entry)
            start = int(address[tile]) + first * int(stride[tile])
            length = count * int(size[tile])
            ctypes.memset(start, 0, length)
            tally[0] += length
            for bad in self.stuck:
                if start <= bad < start + length:
                    ctypes.memset(bad, 1, 1)
            if faulty and entry & FAULT:
                ctypes.memset(start, 1, 1)
            if read_back and entry & READ_BACK:
                found = np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(start)).reshape(count, -1)
                for place in np.flatnonzero(found.any(axis=1)).tolist():
                    flags[position_of(entry) + place] = 1

        spans = [(start, start + length) for start, length in writes]
        self._put(stream, "scrub", [ranges_of(entries)], [*spans, *signals, ranges_of(tally)], steps)

    def _verify_kernel(self, stream: int, arguments: tuple[Any, ...]) -> None:
        listed, address, stride, size, flags, blocks, tiles, *_ = arguments
        spans = [
            (
                int(address[tile]) + block * int(stride[tile]),
                int(address[tile]) + block * int(stride[tile]) + int(size[tile]),
            )
            for block in listed.tolist()
            if 0 <= block < blocks
            for tile in range(tiles)
        ]

        def act() -> None:
            for place, block in enumerate(listed.tolist()):
                for tile in range(tiles) if 0 <= block < blocks else ():
                    start = int(address[tile]) + block * int(stride[tile])
                    if any((ctypes.c_uint8 * int(size[tile])).from_address(start)):
                        flags[place] = 1

        self._put(stream, "verify", spans, [ranges_of(flags)], lambda: [act])

    def _copy_kernel(self, stream: int, arguments: tuple[Any, ...]) -> None:
        source, target, address, stride, size, blocks, tiles, *_ = arguments
        pairs = [
            (int(address[t]) + a * int(stride[t]), int(address[t]) + b * int(stride[t]), int(size[t]))
            for a, b in zip(source.tolist(), target.tolist(), strict=True)
            if 0 <= a < blocks and 0 <= b < blocks
            for t in range(tiles)
        ]

        def act() -> None:
            for read, write, length in pairs:
                ctypes.memmove(write, read, length)

        reads = [(read, read + length) for read, _, length in pairs]
        self._put(stream, "copy", reads, [(write, write + length) for _, write, length in pairs], lambda: [act])

    def _exchange_kernel(self, stream: int, arguments: tuple[Any, ...]) -> None:
        listed, address, stride, size, offset, rows, blocks, tiles, *constants = arguments
        out = bool(constants[2])
        pairs = [
            (
                int(address[t]) + block * int(stride[t]),
                int(offset[t]) + place * int(offset[tiles]),
                int(size[t]),
            )
            for place, block in enumerate(listed.tolist())
            if 0 <= block < blocks
            for t in range(tiles)
        ]
        start = rows.data_ptr()

        def act(rows: torch.Tensor = rows) -> None:  # which is not given to others before this has run
            for inside, at, length in pairs:
                outside = rows.data_ptr() + at
                ctypes.memmove(outside if out else inside, inside if out else outside, length)

        within = [(inside, inside + length) for inside, _, length in pairs]
        without = [(start + at, start + at + length) for _, at, length in pairs]
        reads, writes = (within, without) if out else (without, within)
        self._put(stream, "exchange", reads, writes, lambda: [act])


_NO_STREAM = -1


def _run(entry: int) -> tuple[int, int]:
    run = blocks_of(entry)
    return (int(run[0]), len(run)) if len(run) else (0, 0)


def _inside(entry: int, blocks: int) -> bool:
    first, count = _run(entry)
    return bool(count) and first >= 0 and first + count <= blocks


def ranges_of(tensor: torch.Tensor) -> Range:
    """The addresses of a contiguous tensor."""
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


def rows_of(table: SegmentTable, blocks: Iterable[int]) -> list[Range]:
    """The addresses of blocks, over all segments."""
    return [
        (
            one.address + block * one.block_stride_bytes,
            one.address + block * one.block_stride_bytes + one.piece_bytes,
        )
        for block in blocks
        for one in table.segments
    ]


@contextlib.contextmanager
def fake_cuda(seed: int = 0) -> Iterator[FakeCuda]:
    """A device into which our kernels are launched; tables are in host memory."""
    device = FakeCuda(seed)
    with fake_triton(on_launch=device.launched) as driver:
        driver.stream = _NO_STREAM
        yield device
