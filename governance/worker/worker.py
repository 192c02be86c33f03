"""One engine process under governance: settings in, a Governor out, everything opened in order and closed in reverse.

- Nothing is admitted before the worker and its policy are on record, and before every block is zero.
- Erasures that this worker owes an answer for, after a crash too, take effect before the first request.
- `close` releases every request, ends all custody, zeroes the pools and hands over the evidence; without it the next
  start of the same worker closes this one's custody as unproven.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import NamedTuple

from kvcustody.allocator.pool.memory_protocol import Memory
from kvcustody.allocator.pool.options import PoolOptions
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.write.event_writer import LedgerWriter
from kvcustody.clock import Clock
from kvcustody.deadline_clock import DeadlineClock
from kvcustody.governance.control_plane.agent import start_agent
from kvcustody.governance.custody_events import worker_stopped
from kvcustody.governance.erasure.tier_protocol import CompletedErasure
from kvcustody.governance.governor.governor import Governor
from kvcustody.governance.governor.pools import Pools
from kvcustody.governance.keys.key_backups import KeyBackups
from kvcustody.governance.orphans.ledger_join import recover
from kvcustody.governance.orphans.scans import Scanned
from kvcustody.governance.release.worker_follow import follow_release
from kvcustody.governance.settings import Settings
from kvcustody.governance.tiers.heirs import TierHolder
from kvcustody.governance.tiers.open_tiers import (
    BlockShape,
    open_tiers,
    refuse_absent_store,
    tier_names,
    tier_plan,
)
from kvcustody.governance.worker.follow_epochs import follow_epochs
from kvcustody.governance.worker.open_foundation import custody_lease, open_foundation, warn_of_idle_fields
from kvcustody.governance.worker.plugins import load_plugins, open_root_key
from kvcustody.logger import get_logger
from kvcustody.policies.document.model import Tier
from kvcustody.policies.workbench.lint.without_effect import PoolOwner

_log = get_logger(__name__)


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
        self,
        governor: Governor,
        writer: LedgerWriter,
        name: str,
        clock: DeadlineClock,
        stack: ExitStack,
        signer: CheckpointSigner | None = None,
    ) -> None:
        self.governor = governor
        self.writer = writer
        self.name = name
        self.signer = signer  # its status says up to where the ledger is signed
        self._clock = clock
        self._stack = stack
        self.completed: Callable[[], list[CompletedErasure]] = list  # what the ledger knows as erased

    def recover(self) -> Scanned:
        """On the owning thread, between steps: a full scan with repair, joined with the ledger where possible."""
        return recover(self.governor.scan_and_recover, self.writer)

    def close(self) -> None:
        """Stop in order; a second time changes nothing."""
        self._stack.close()

    def stop(self) -> None:
        """The first step of closing: the Governor ends, then the worker's own counters go on record."""
        self.governor.close()
        pools = self.governor.stats().pools
        shards = max((len(pool.scrubbed) for pool in pools), default=0)
        scrubbed = tuple(sum(pool.scrubbed[shard] for pool in pools) for shard in range(shards))
        allocated = sum(pool.allocated for pool in pools)
        now_us, tiers = self._clock.now_us(), self.governor.counts().tiers
        self.writer.submit([worker_stopped(now_us, self.name, "closed", allocated, scrubbed, tiers)])
        _log.info("worker stopped", worker=self.name, blocks_allocated=allocated)

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_worker(settings: Settings, memory: MemoryPlan, *, clock: Clock | None = None, origin: str = "") -> Worker:
    """Open a worker over `memory`; `origin` is what its start says of all that it records (`WorkerStarted`).

    Raises a `CustodyError` that names what cannot be opened; what was open by then is closed again.
    """
    plugins = load_plugins(settings)
    eviction = plugins.eviction_order()
    with ExitStack() as stack:
        clock = settings.open_clock(clock, stack)
        standing, keyring, writer, signer, inbox, connection = open_foundation(
            settings,
            clock,
            stack,
            blocks=memory.blocks,
            shards=memory.shards,
            bytes_per_block=memory.bytes_per_block,
            device=memory.device,
            origin=origin,
        )
        pools = Pools(
            memory.make,
            memory.blocks,
            _options(settings, memory.blocks),
            residencies_max=settings.residencies_per_tenant_max,
            eviction=eviction,
        )
        table = standing.table
        if not plugins.tiers:  # an extension may be the remote store
            refuse_absent_store(table.policy, tier_names(settings))
        warn_of_idle_fields(table, PoolOwner.KVCUSTODY, tier_names(settings))
        tiers = None
        plan = tier_plan(settings)
        if plan is not None:
            shape = BlockShape(memory.bytes_per_block, memory.shards, settings.block_tokens)
            port = open_root_key(settings)
            holder = TierHolder(settings.worker_name, settings.placement_group, writer.incarnation)
            tiers = partial(open_tiers, plan, shape, keyring, port, clock, stack, holder=holder)
        governor = Governor(
            pools,
            table,
            keyring,
            writer,
            clock=clock,
            expires_utc_us=standing.expires_utc_us,
            tiers=tiers,
            moves_always=plan is not None and plan.moves_always,
        )
        governor.set_store(is_there=bool(plugins.tiers) or Tier.REMOTE in tier_names(settings))
        governor.erasures.tiers += plugins.open_tiers(settings, tier_names(settings))
        governor.erasures.backed_up_until = KeyBackups(settings.shred_keys_path).open_until
        worker = Worker(governor, writer, settings.worker_name, clock, ExitStack(), signer)
        stack.callback(worker.stop)
        worker.completed = inbox.completed
        governor.may_monitor = settings.monitoring == "allowed"
        governor.placement_group = settings.placement_group
        follow_epochs(connection, governor, clock, stack, lease_seconds=custody_lease(settings, standing.table))
        governor.erasures.destroy_returned(inbox.completed)
        inbox.recover_pending(governor)
        if settings.scan_online:
            governor.scan_online()
        inbox.start(governor, settings.erasure_poll_ms / 1000)
        stack.callback(inbox.stop)
        follow_release(standing, governor, clock, stack, lease_seconds=settings.policy_lease_seconds)
        start_agent(connection, governor, writer, clock, stack, bytes_per_block=memory.bytes_per_block)
        worker._stack = stack.pop_all()
        _log.info(
            "worker started",
            worker=settings.worker_name,
            policy=table.policy.name,
            policy_digest=table.digest,
        )
        return worker


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
