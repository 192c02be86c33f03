"""Where the stages work: a CUDA or ROCm device, or the rehearsal's stand-in for one, behind the same few calls.

    lab.engine("forward", act, table, blocks)   # the engine's kernel, on its current stream
    lab.pause(rng)                              # the device is busy for a random while; the host goes on
    OrderedScrub(table, streams=lab.streams())  # custody, as it is

- The stand-in is `standins.device.fake_cuda`: our launches go through Triton's own dispatch and compilation into it,
  work runs later in any interleaving that the waits allow, and unordered accesses are counted as races.
- `nonzero` looks with torch alone: no kernel of ours vouches for itself.
- `memory` outlives the process that filled it, as a device's may: the stand-in is a file.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.hardware import REPOSITORY

from kvcustody.kernels.launch import to_device
from kvcustody.kernels.segment import SegmentTable

CYCLES = 20_000_000  # some ten milliseconds: long enough for a host that does not wait to overtake


class Lab:
    """What both share. `rehearsal` chooses sizes and what can be asked, never what passes."""

    rehearsal: bool
    device: str

    def tensor(self, *shape: int, byte: int = 0) -> torch.Tensor:
        """uint8 of this shape, filled."""
        return torch.full(shape, byte, dtype=torch.uint8, device=self.device)

    def index(self, blocks: Sequence[int] | np.ndarray) -> torch.Tensor:
        """A list on the device, put there without the host's waiting."""
        return to_device(np.array(blocks, dtype=np.int64), torch.device(self.device))

    def nonzero(self, table: SegmentTable, blocks: Sequence[int] | np.ndarray) -> int:
        """Bytes of the listed blocks that are not zero, after everything has run."""
        self.synchronize()
        index = self.index(blocks)
        return sum(int((words[index].view(torch.uint8) != 0).sum()) for words in table.words)

    def size(self, device: int, rehearsal: int) -> int:
        """One of two sizes."""
        return rehearsal if self.rehearsal else device

    def by_torch(self) -> Any:
        """Only the stand-in has another way."""
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        """The host waits for everything; refused while anything is recorded."""
        raise NotImplementedError


class Cuda(Lab):
    """The device itself."""

    rehearsal = False
    device = "cuda"

    def streams(self) -> Any:
        """OrderedScrub's own."""
        return None

    def engine(
        self, name: str, act: Callable[[], Any], table: SegmentTable, blocks: Any, *, writes: bool = True
    ) -> None:
        """The engine's kernel, on its current stream."""
        act()

    def pause(self, rng: random.Random) -> None:
        """The current stream is busy for up to `CYCLES`."""
        torch.cuda._sleep(rng.randrange(CYCLES))

    def stall(self) -> None:
        """The current stream is busy long enough for whoever does not wait."""
        torch.cuda._sleep(3 * CYCLES)

    def run_ahead(self, rng: random.Random) -> None:
        """The device runs by itself."""

    def stream(self) -> Any:
        """Another one of the engine's."""
        return torch.cuda.Stream()

    def on(self, stream: Any) -> Any:
        """Work goes there meanwhile."""
        return torch.cuda.stream(stream)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def races(self) -> int | None:
        """A device does not tell."""
        return None

    @contextlib.contextmanager
    def capture(self) -> Iterator[torch.cuda.CUDAGraph]:
        """The engine records a graph on a stream of its own."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            yield graph

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        graph.replay()

    @contextlib.contextmanager
    def compiles(self) -> Iterator[list[str]]:
        """Names of the kernels that Triton compiles or loads meanwhile."""
        import triton

        names: list[str] = []
        before = triton.knobs.runtime.jit_post_compile_hook

        def hook(*_: Any, **told: Any) -> None:
            names.append(told["fn"].name.rpartition(".")[2])

        triton.knobs.runtime.jit_post_compile_hook = hook
        try:
            yield names
        finally:
            triton.knobs.runtime.jit_post_compile_hook = before

    def memory(self, path: Path, mib: int) -> torch.Tensor:
        """Fresh memory, uint8 [mib, 2^20], not written."""
        return torch.empty(mib, 1 << 20, dtype=torch.uint8, device="cuda")

    def return_memory(self) -> None:
        """What is not referenced goes back to the driver."""
        torch.cuda.empty_cache()


class Rehearsal(Lab):
    """The stand-in."""

    rehearsal = True
    device = "cpu"

    def __init__(self, fake: Any, driver: Any, rows_of: Callable[..., Any]) -> None:
        self._fake, self._driver, self._rows_of = fake, driver, rows_of

    def streams(self) -> Any:
        return self._fake

    def engine(
        self, name: str, act: Callable[[], Any], table: SegmentTable, blocks: Any, *, writes: bool = True
    ) -> None:
        rows = self._rows_of(table, [int(one) for one in blocks])
        ranges = {"writes": rows} if writes else {"reads": rows}
        self._fake.op(self._fake.current(), name, act=act, **ranges)

    def pause(self, rng: random.Random) -> None:
        """Which stream is slow is drawn at each step."""

    def stall(self) -> None:
        """As `pause`."""

    def run_ahead(self, rng: random.Random) -> None:
        for _ in range(rng.randrange(12)):
            self._fake.advance()

    def stream(self) -> Any:
        return self._fake.side()

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        here = self._fake._here
        before = self._fake.current()
        here.stream = stream
        try:
            yield
        finally:
            here.stream = before

    def synchronize(self) -> None:
        self._fake.synchronize()

    def races(self) -> int | None:
        return len(self._fake.races)

    def capture(self) -> Any:
        return self._fake.capture(self._fake.side())

    def replay(self, graph: Any) -> None:
        self._fake.replay(self._fake.current(), graph)

    @contextlib.contextmanager
    def compiles(self) -> Iterator[list[str]]:
        names: list[str] = []
        before = len(self._driver.compiled)
        try:
            yield names
        finally:
            names += self._driver.compiled[before:]

    def memory(self, path: Path, mib: int) -> torch.Tensor:
        flat = torch.from_file(str(path), shared=True, size=mib << 20, dtype=torch.uint8)
        return flat.view(mib, 1 << 20)

    def return_memory(self) -> None:
        """A file keeps what was written."""

    @contextlib.contextmanager
    def by_torch(self) -> Iterator[None]:
        """Tables of the host are served by torch meanwhile, as where there is no device."""
        users = [
            one for name, one in sys.modules.items() if name.startswith("kvcustody.") and hasattr(one, "uses_triton")
        ]
        users += [one for one in sys.modules.values() if getattr(one, "__name__", "") == "device.scrub"]
        before = [one.uses_triton for one in users]
        for one in users:
            one.uses_triton = lambda table: False
        try:
            yield
        finally:
            for one, kept in zip(users, before, strict=True):
                one.uses_triton = kept


@contextlib.contextmanager
def lab_of(*, rehearse: bool) -> Iterator[Any]:
    """The device, or its stand-in."""
    if not rehearse:
        yield Cuda()
        return
    sys.path.insert(0, str(REPOSITORY / "tests" / "lib"))
    from standins.device import fake_cuda

    fake = fake_cuda.FakeCuda(1)
    with fake_cuda.fake_triton(on_launch=fake.launched) as driver:
        driver.stream = -1  # the caller's
        yield Rehearsal(fake, driver, fake_cuda.rows_of)
