"""One engine process under governance: settings in, a Governor out, everything opened in order and closed in reverse.

W1  Nothing is admitted before the worker and its policy are on record, and before every block is zero.
W2  A policy of another profile than the deployment promises is refused.
W3  `close` releases every request, ends all custody, zeroes the pools and hands over the evidence; without it the next
    start of the same worker closes this one's custody as unproven.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import NamedTuple

import structlog

import kvcustody
from kvcustody.allocator.manager import PoolOptions
from kvcustody.allocator.memory import Memory
from kvcustody.audit.events import PolicyActivated, WorkerStarted, WorkerStopped
from kvcustody.audit.store import open_store
from kvcustody.audit.writer import EventWriter, WriterSettings
from kvcustody.clock import Clock, SystemClock
from kvcustody.errors import ConfigError
from kvcustody.governance.governor import Governor
from kvcustody.governance.key_store import FileKeyStore
from kvcustody.governance.keyring import Keyring
from kvcustody.governance.pools import Pools
from kvcustody.governance.settings import Settings
from kvcustody.governance.wrapping import open_wrapping
from kvcustody.migrations.upgrade import upgrade
from kvcustody.policies.compiler import compile_policy
from kvcustody.policies.loader import load_policy
from kvcustody.policies.table import DecisionTable

_log = structlog.get_logger(__name__)


class MemoryPlan(NamedTuple):
    """The memory a worker governs. `make` is called with a number of blocks for each pool of the profile."""

    make: Callable[[int], Memory]
    blocks: int
    shards: int
    bytes_per_block: int
    device: str = "cpu"


class Worker:
    """An open worker. Use it as a context manager, or call `close`."""

    def __init__(
        self, governor: Governor, writer: EventWriter, name: str, clock: Clock, stack: ExitStack
    ) -> None:
        self.governor = governor
        self.writer = writer
        self.name = name
        self._clock = clock
        self._stack = stack

    def close(self) -> None:
        """Stop in order (W3); a second time changes nothing."""
        self._stack.close()

    def stop(self) -> None:
        """The first step of closing: the Governor ends, then the worker's own counters go on record."""
        self.governor.close()
        pools = self.governor.stats().pools
        shards = max((len(pool.scrubbed) for pool in pools), default=0)
        scrubbed = tuple(sum(pool.scrubbed[shard] for pool in pools) for shard in range(shards))
        allocated = sum(pool.allocated for pool in pools)
        self.writer.submit([WorkerStopped(self._clock.now_us(), self.name, "closed", allocated, scrubbed)])
        _log.info("worker stopped", worker=self.name, blocks_allocated=allocated)

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_worker(settings: Settings, memory: MemoryPlan, *, clock: Clock | None = None) -> Worker:
    """Open a worker over `memory`.

    Raises a `CustodyError` that names what cannot be opened; what was open by then is closed again.
    """
    clock = clock or SystemClock()
    table = _table(settings)
    with ExitStack() as stack:
        port = open_wrapping(settings.root_key_source, settings.root_key_path, strict=settings.strict)
        keyring = Keyring(FileKeyStore(settings.keyring_path), port, clock)
        stack.callback(keyring.close)
        engine = open_store(settings.database_url)
        stack.callback(engine.dispose)
        upgrade(engine)
        sizes = WriterSettings(spill_bytes=int(settings.spill_bytes_max))
        settings.spill_path.mkdir(mode=0o700, parents=True, exist_ok=True)
        writer = EventWriter(
            engine,
            worker=settings.worker_name,
            clock=clock,
            spill_directory=settings.spill_path,
            settings=sizes,
        )
        stack.callback(writer.close)
        _announce(writer, settings, table, memory, clock.now_us())
        pools = Pools(
            memory.make,
            memory.blocks,
            _options(settings, memory.blocks),
            residencies_max=settings.residencies_per_tenant_max,
        )
        governor = Governor(pools, table, keyring, writer, clock=clock)
        worker = Worker(governor, writer, settings.worker_name, clock, ExitStack())
        stack.callback(worker.stop)
        worker._stack = stack.pop_all()
        _log.info(
            "worker started",
            worker=settings.worker_name,
            policy=table.policy.name,
            policy_digest=table.digest,
        )
        return worker


def _table(settings: Settings) -> DecisionTable:
    path = settings.policy_path
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"policy `{path}`: {error.strerror}", path=path) from error
    policy = load_policy(text, name=str(path))
    if policy.profile.value != settings.profile:
        raise ConfigError(
            f"policy `{path}` has the profile `{policy.profile.value}`, this deployment promises `{settings.profile}`",
            path=path,
            profile=settings.profile,
        )
    return compile_policy(policy, revision=1)


def _options(settings: Settings, blocks: int) -> PoolOptions:
    reserve = int(blocks * settings.clean_reserve_share)
    return PoolOptions(
        block_tokens=settings.block_tokens,
        reserve_low=reserve // 2,
        reserve_high=reserve,
        scrub_batch=min(settings.scrub_batch_blocks, max(1, blocks // 8)),
        sweep_batch=settings.sweep_batch_residencies,
        fence_bound_us=settings.fence_bound_ms * 1000,
    )


def _announce(
    writer: EventWriter, settings: Settings, table: DecisionTable, memory: MemoryPlan, now_us: int
) -> None:
    """The worker and its policy, on record before the first request (W1)."""
    software = f"kvcustody {kvcustody.__version__}"
    started = WorkerStarted(
        now_us,
        settings.worker_name,
        memory.blocks,
        memory.shards,
        memory.bytes_per_block,
        memory.device,
        software,
        table.revision,
    )
    writer.submit([started])
    policy = table.policy
    writer.submit_durable(
        PolicyActivated(
            now_us, table.revision, policy.name, policy.profile.value, table.digest, settings.worker_name
        )
    )
