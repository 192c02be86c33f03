"""One engine that allocates by itself, under governance: settings in, an `EnginePort` out (governance.worker's twin).

- The worker and its policy are on record, and a dead predecessor's custody is closed, before the first request.
- The first scrub order covers the whole pool, so every block is zero before its first use.
- Erasures that this worker owes an answer for, after a crash too, take effect with the first step.
- `close` ends all custody and says so; without it the next start closes this one's custody as unproven.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import NamedTuple

from kvcustody.allocator.external.block_ranking import ranked_sample
from kvcustody.allocator.external.pool import ExternalPool
from kvcustody.allocator.external.scrub_queue import ScrubOrder
from kvcustody.allocator.prefix.eviction_policy import EvictionPolicy
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.write.event_writer import LedgerWriter
from kvcustody.clock import Clock
from kvcustody.deadline_clock import DeadlineClock
from kvcustody.errors import ConfigError
from kvcustody.governance.control_plane.agent import start_agent
from kvcustody.governance.custody_events import worker_stopped
from kvcustody.governance.erasure.tier_protocol import CompletedErasure
from kvcustody.governance.external.engine_control import EngineControl
from kvcustody.governance.external.engine_port import EnginePort
from kvcustody.governance.keys.key_backups import KeyBackups
from kvcustody.governance.orphans.ledger_join import recover
from kvcustody.governance.orphans.scans import Scanned
from kvcustody.governance.release.worker_follow import follow_release
from kvcustody.governance.settings import Settings
from kvcustody.governance.tiers.open_tiers import refuse_absent_store
from kvcustody.governance.worker.follow_epochs import follow_epochs
from kvcustody.governance.worker.open_foundation import custody_lease, open_foundation, warn_of_idle_fields
from kvcustody.governance.worker.plugins import load_plugins
from kvcustody.logger import get_logger
from kvcustody.policies.document.model import Tier
from kvcustody.policies.workbench.lint.without_effect import PoolOwner

_log = get_logger(__name__)


class EnginePlan(NamedTuple):
    """The pool an engine brings. `reserved` blocks are never anybody's; `can_sum` as `EnginePort` takes it.

    `tiers`: where its adapter copies blocks to, as the policy names tiers.
    """

    blocks: int
    block_tokens: int
    shards: int = 1
    bytes_per_block: int = 0
    device: str = "cpu"
    reserved: tuple[int, ...] = ()
    keep_last: bool = True
    can_sum: bool = False
    tiers: tuple[str, ...] = ()


class EngineWorker:
    """An open worker. `port` belongs to the engine's thread; use the worker as a context manager, or call `close`."""

    def __init__(
        self,
        port: EnginePort,
        writer: LedgerWriter,
        name: str,
        clock: DeadlineClock,
        stack: ExitStack,
        signer: CheckpointSigner | None = None,
    ) -> None:
        self.port = port
        self.writer = writer
        self.name = name
        self.signer = signer  # its status says up to where the ledger is signed
        self.clock = clock
        self._stack = stack
        self._closed = False
        self.completed: Callable[[], list[CompletedErasure]] = list  # what the ledger knows as erased

    def recover(self) -> Scanned:
        """On the engine's thread, between steps: a full scan with repair, joined with the ledger where possible."""
        return recover(self.port.scan_and_recover, self.writer)

    def close(self, last: Callable[[ScrubOrder], None] | None = None) -> None:
        """Stop in order; a second time changes nothing.

        `last` executes the final scrub order and reports it through `port.scrubbed`, where the engine's workers still
        live; without it, what ended last stays without a receipt and is reported so.
        """
        if self._closed:
            return
        self._closed = True
        with self._stack:
            self._stop(last)

    def _stop(self, last: Callable[[ScrubOrder], None] | None) -> None:
        port = self.port
        port.close()
        order = port.step()
        if order is not None and last is not None:
            last(order)
        tiers = port.counts().tiers  # hands over what the last order proved
        queue = port.pool.queue
        allocated = port.pool.next_generation - 1
        now_us, scrubbed = self.clock.now_us(), tuple(queue.device_blocks)
        self.writer.submit([worker_stopped(now_us, self.name, "closed", allocated, scrubbed, tiers)])
        _log.info("worker stopped", worker=self.name, blocks_allocated=allocated)

    def __enter__(self) -> EngineWorker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _refuse_what_no_rank_follows(eviction: Callable[[], EvictionPolicy], setting: str) -> None:
    """An engine's blocks have ranks, and no keys or tree: a policy that asks for more says so at the start."""
    try:
        level = eviction().level(ranked_sample())
        fits = isinstance(level, int) and -(1 << 62) < level < 1 << 62
        reason = f"its level is `{level!r}`, and must be an integer of 62 bits"
    except Exception as error:
        fits, reason = False, f"{type(error).__name__}: {error}"
    if not fits:
        raise ConfigError(
            f"setting `eviction_policy`: `{setting}` cannot order an engine's blocks by what is known of "
            f"them: {reason}",
            eviction_policy=setting,
        )


def open_engine_worker(
    settings: Settings, plan: EnginePlan, engine: EngineControl, *, clock: Clock | None = None
) -> EngineWorker:
    """Open a worker over an engine's pool.

    Raises a `CustodyError` that names what cannot be opened; what was open by then is closed again.
    """
    plugins = load_plugins(settings)
    eviction = plugins.eviction_order()
    if eviction is not None:
        _refuse_what_no_rank_follows(eviction, settings.eviction_policy)
    with ExitStack() as stack:
        clock = settings.open_clock(clock, stack)
        standing, keyring, writer, signer, inbox, connection = open_foundation(
            settings,
            clock,
            stack,
            blocks=plan.blocks - len(plan.reserved),
            shards=plan.shards,
            bytes_per_block=plan.bytes_per_block,
            device=plan.device,
        )
        may_have_store = bool(plugins.tiers) or settings.scope_salts_path is not None  # a cache layer may have one
        if not may_have_store:
            refuse_absent_store(standing.table.policy, plan.tiers)
        warn_of_idle_fields(standing.table, PoolOwner.ENGINE, plan.tiers)
        pool = ExternalPool(
            plan.blocks,
            shards=plan.shards,
            bytes_per_block=plan.bytes_per_block,
            reserved=plan.reserved,
            fence_bound_us=settings.fence_bound_ms * 1000,
        )
        port = EnginePort(
            pool,
            engine,
            standing.table,
            keyring,
            writer,
            clock=clock,
            expires_utc_us=standing.expires_utc_us,
            block_tokens=plan.block_tokens,
            keep_last=plan.keep_last,
            residencies_max=settings.residencies_per_tenant_max,
            eviction=eviction,
            can_sum=plan.can_sum,
        )
        port.may_monitor = settings.monitoring == "allowed"
        port.placement_group = settings.placement_group
        port.set_store(is_there=may_have_store or Tier.REMOTE in plan.tiers)
        port.erasures.tiers += plugins.open_tiers(settings)
        port.erasures.backed_up_until = KeyBackups(settings.shred_keys_path).open_until
        follow_epochs(connection, port, clock, stack, lease_seconds=custody_lease(settings, standing.table))
        port.erasures.destroy_returned(inbox.completed)
        inbox.look(port)
        inbox.start(port, settings.erasure_poll_ms / 1000)
        stack.callback(inbox.stop)
        follow_release(standing, port, clock, stack, lease_seconds=settings.policy_lease_seconds)
        start_agent(connection, port, writer, clock, stack, bytes_per_block=plan.bytes_per_block)
        worker = EngineWorker(port, writer, settings.worker_name, clock, stack.pop_all(), signer)
        worker.completed = inbox.completed
        _log.info(
            "worker started",
            worker=settings.worker_name,
            policy=standing.table.policy.name,
            policy_digest=standing.table.digest,
        )
        return worker
