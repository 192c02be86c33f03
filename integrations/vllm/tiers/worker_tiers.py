"""The worker's half of tiers: it seals its own shard of blocks that leave, and opens those that return.

    tiers.begin(order)            # before anything of a step is written: what is to be stored is copied aside
    tiers.go_on()                 # after its scrubs: the other jobs
    tiers.finished_loads(), tiers.failed_blocks(), tiers.replies()

1. A step waits for copies into locked buffers alone. Sealing, opening and stores are done on a thread for each tier, in
   the order of the jobs.
2. What was copied aside is zeroed when its job is over, whatever happened.
3. A load that fails fills nothing of what it could not open; its blocks are told as failed, and vLLM computes them. So
   are those of a copy that is due when they are told.
4. Keys come from this process's own access to the keyring, which is read again when its file has changed.
5. What is due ends by the thread's own clock, also when no step comes.
6. Objects that another worker fetches are read by the tier's thread, sealed as they are stored. Objects that this
   worker fetches come on a separate thread, and are then kept by the tier's thread.
7. A scan has the thread compare the store with the index between two jobs: what a job made is in both by then.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from queue import Empty, SimpleQueue
from time import perf_counter_ns
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch

from kvcustody.allocator.pool.tensor_memory import TensorMemory
from kvcustody.clock import Clock
from kvcustody.errors import ConfigError, KeyringError
from kvcustody.files import private_folder
from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.governance.erasure.tier_protocol import TierErased
from kvcustody.governance.handover.offers import OfferedPart
from kvcustody.governance.keys import core_dumps
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.keyring_watch import KeyringWatch
from kvcustody.governance.keys.shred_keys import ShredKeys
from kvcustody.governance.keys.wrapped_key_store import FileKeyStore
from kvcustody.governance.orphans.finding import Finding, repair_all
from kvcustody.governance.orphans.scans import tier_findings
from kvcustody.governance.settings import Settings
from kvcustody.governance.tiers.copies.index import KEY_BYTES, CopyLimit, TierShare, TierTerms
from kvcustody.governance.tiers.open_tiers import TierPlan, tier_names
from kvcustody.governance.tiers.seal.object_layout import object_bytes
from kvcustody.governance.tiers.seal_keys import SealKeys
from kvcustody.governance.tiers.staging import Staging
from kvcustody.governance.tiers.stores.file_store import FileStore
from kvcustody.governance.tiers.stores.guarded_store import GuardedStore
from kvcustody.governance.tiers.stores.node_arenas import open_host_arena
from kvcustody.governance.tiers.stores.open_remote import open_remote
from kvcustody.governance.tiers.stores.store_protocol import TierStore
from kvcustody.governance.tiers.tier import GivenObjects, Restored, SealedTier, in_time
from kvcustody.governance.tiers.tier_rules import NOT_HERE
from kvcustody.governance.worker.plugins import open_root_key
from kvcustody.guarding_thread import GuardingThread
from kvcustody.integrations.vllm.tiers.tier_messages import (
    CloseTier,
    CompareCopies,
    CopyJob,
    CopyReply,
    CopyRule,
    DestroyCopies,
    EraseCopies,
    EraseReturned,
    ExpireCopies,
    FetchCopies,
    FetchedCopies,
    ForgetTenant,
    LoadCopies,
    LoadPart,
    NarrowCopies,
    OfferCopies,
    OpenedTier,
    OpenTier,
    ProbeCopy,
    Rules,
    SeekCopies,
    SoughtChain,
    SoughtCopy,
    StoreCopy,
    received,
)
from kvcustody.integrations.vllm.tiers.worker_handover import GivePart, KeepCopies, WorkerHandover
from kvcustody.logger import get_logger

_LOOK_SECONDS = 0.25  # between looks at what is due
_END_SECONDS = 10.0  # that a thread may take to end
_ENDS_SOUGHT = 4  # of a hit of several layer groups, in a store that workers share
_RULES_MAX = 65_536  # beyond it, those of who does not ask are forgotten until it asks again
_NO_SHARE = TierShare(0.0, 0.0)
_log = get_logger(__name__)
T = TypeVar("T")


class WorkerKeys(NamedTuple):
    """A worker's access to secrets: its keyring, the keyring's file, and the shred keys."""

    keyring: Keyring
    path: Path
    shred: ShredKeys


def open_worker_keys(settings: Settings, plan: TierPlan, clock: Clock, stack: ExitStack) -> WorkerKeys:
    """Open what the settings name; `stack` forgets it.

    Raises:
        CustodyError: says what cannot be opened.
    """
    core_dumps.disable_core_dumps(strict=settings.strict)
    try:
        port = open_root_key(settings)
    except KeyringError:  # another worker of the first start made the file between our look and our writing
        port = open_root_key(settings)
    path = settings.keyring_path
    shred = ShredKeys.open(plan.shred_keys, port, clock)
    stack.callback(shred.close)
    keyring = Keyring(FileKeyStore(path), port, clock)
    stack.callback(keyring.close)
    return WorkerKeys(keyring, path, shred)


class WorkerTiers:
    """The tiers of one worker. Called on the worker's own thread."""

    def __init__(
        self,
        settings: Settings,
        plan: TierPlan,
        memory: TensorMemory,
        *,
        shard: int,
        shards: int,
        software: tuple[str, ...],
        clock: Clock,
        stack: ExitStack,
        groups: int = 1,
    ) -> None:
        """Open the tiers; `stack` is closed with them.

        Raises:
            CustodyError: names the setting of a missing part.

        software: what else a block's bytes depend on. groups: layer groups, each of which is stored by itself.
        """
        self._blocks = BlockBytes(memory)
        self._clock = clock
        self._shard = shard
        self._results: deque[CopyReply] = deque()
        self._later: list[CopyJob] = []
        self._loading: dict[int, LoadCopies] = {}
        self._finished: set[str] = set()
        self._failed: set[int] = set()
        self._failed_requests: set[str] = set()
        self._ready: list[CopyReply] = []
        self.threads: dict[str, TierThread] = {}
        size = plan.object_blocks * self._blocks.block_bytes
        tiers = tier_names(settings)
        self.buffers = max(plan.staging_buffers, len(tiers) * groups)
        with stack:  # what is open where the rest cannot be is closed again
            try:
                self.staging = Staging(self.buffers, size)
                stack.callback(self.staging.close)
                self.staging.pin(memory.pin)
            except ConfigError as error:
                raise ConfigError(f"settings `tier_staging_buffers`, `tier_object_blocks`: {error.message}") from None
            keys = open_worker_keys(settings, plan, clock, stack)
            stack.callback(self._end_threads)  # before the keys go that they use
            terms = TierTerms(
                layout=self._blocks.layout(*software),
                block_bytes=self._blocks.block_bytes,
                block_tokens=0,  # the scheduler says it
                limit=lambda *_: NOT_HERE,
                object_blocks=plan.object_blocks,
                shard=shard,
                shards=shards,
                encloses=settings.handover_peers_path is not None,
            )
            for tier in tiers:
                with ExitStack() as opening:
                    where = _StoreOf(settings.worker_name, shard, shards, self._blocks.block_bytes)
                    store = _open_store(tier, plan, where, clock)
                    opening.callback(store.close)
                    thread = TierThread(tier, store, keys, terms, self._blocks, clock, self._results)
                    self.threads[tier] = thread
                    opening.pop_all()  # from now on its thread closes it
            self._handover: WorkerHandover | None = None
            if settings.handover_peers_path is not None:
                first = next(iter(self.threads.values()))
                self._handover = WorkerHandover(settings, first, self._results, clock, shard, stack)
            self._stack = stack.pop_all()
        _log.info("tiers opened", shard=shard, tiers=list(self.threads), buffers=self.buffers, object_bytes=size)

    def begin(self, jobs: tuple[CopyJob, ...]) -> None:
        """Copy blocks to store aside before this step's first write; the rest waits for `go_on`."""
        for job in jobs:
            if isinstance(job, StoreCopy):
                held = ExitStack()
                plain = held.enter_context(self.staging.take(len(job.blocks) * self._blocks.block_bytes))
                if plain is not None:
                    self._blocks.read(job.blocks, plain)
                self.threads[job.tier].put(job, plain, held)
            else:
                self._later.append(job)

    def go_on(self) -> None:
        """Continue after the step's scrubs were done, or ordered ahead of what follows."""
        later, self._later = self._later, []
        for job in later:
            if isinstance(job, LoadCopies):
                self._loading[job.number] = job
            if isinstance(job, OpenTier):
                self.threads[job.tier].buffers = self.buffers
                if self._handover is not None and job.holder is not None:
                    self._handover.begin(job.tier, job.holder.incarnation)
            if self._handover is not None and isinstance(job, FetchCopies | OfferCopies):
                self._handover.put(job)
                continue
            self.threads[job.tier].put(job)
            if isinstance(job, CloseTier):
                self.threads[job.tier].join()
        if self._handover is not None:
            self._handover.end_step()

    def finished_loads(self) -> set[str]:
        """Return requests whose load ended since the last call, with any result."""
        self._collect()
        finished, self._finished = self._finished, set()
        return finished

    def failed_blocks(self) -> set[int]:
        """Return blocks that a load could not fill, since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def failed_requests(self) -> set[str]:
        """Return requests whose load of several layer groups was incomplete, since the last call."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def replies(self) -> list[CopyReply]:
        """Return the replies since the last call."""
        self._collect()
        ready, self._ready = self._ready, []
        return ready

    def close(self) -> None:
        """End what does not outlive the process, zero every buffer, and forget the keys; a second call does nothing."""
        self._stack.close()

    def _end_threads(self) -> None:
        for thread in self.threads.values():
            thread.put(CloseTier(0, thread.name))
        for thread in self.threads.values():
            thread.join()

    def _collect(self) -> None:
        while self._results:
            reply = self._results.popleft()
            job = self._loading.pop(reply.number, None)
            if job is not None:
                reply = reply._replace(restored=tuple(in_time(reply.restored, self._clock.now_us())))
                come = sum(one.blocks for one in reply.restored)
                missing = [block for part in job.parts for block in part.blocks][come:]
                if not job.together:
                    self._failed.update(missing)
                elif missing:  # one group's blocks are of no use without the others'
                    self._failed_requests.add(job.request_id)
                self._finished.add(job.request_id)
            self._ready.append(reply)


ThreadJob: TypeAlias = CopyJob | KeepCopies | GivePart


class TierThread:
    """One tier of one worker, with its own thread, which is the only user."""

    def __init__(
        self,
        name: str,
        store: TierStore,
        keys: WorkerKeys,
        terms: TierTerms,
        blocks: BlockBytes,
        clock: Clock,
        results: deque[CopyReply],
    ) -> None:
        self.name = name
        self.store = store
        self.terms = terms
        self.buffers = 0  # for stores, as the first job's answer says
        self.narrowed = 0  # how often policy or keys have changed, by what was put
        self.tier: SealedTier | None = None
        self.staging = Staging(1, terms.object_blocks * terms.block_bytes)
        self.staging.pin(blocks.pin)
        self._keys = keys
        self._seal_keys = SealKeys(keys.keyring, keys.shred)
        self._blocks = blocks
        self._clock = clock
        self._results = results
        self._rules: Rules = {}
        self._shares: dict[str, TierShare] = {}
        self._watch = KeyringWatch(keys.keyring, keys.path)
        self._jobs: SimpleQueue[tuple[ThreadJob, memoryview | None, ExitStack | None]] = SimpleQueue()
        self._is_over = False
        self._thread = GuardingThread(self._run, name=f"kvcustody-{name}")
        self._thread.start()

    def put(self, job: ThreadJob, plain: memoryview | None = None, held: ExitStack | None = None) -> None:
        """Append this to the thread's work. `plain`: what to store; `held` returns its buffer."""
        self.narrowed += isinstance(job, NarrowCopies)
        self._jobs.put((job, plain, held))

    def give(self, part: OfferedPart, seconds: float) -> GivenObjects:
        """Return the tier's part of a chain, read on its thread; nothing where that takes too long."""
        asked = GivePart(part, SimpleQueue())
        self.put(asked)
        try:
            return asked.answer.get(timeout=seconds)
        except Empty:
            return GivenObjects()

    def join(self) -> None:
        """Wait, for a limited time, for the end that was put."""
        self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        while not self._is_over:
            try:
                job, plain, held = self._jobs.get(timeout=self._pause_seconds())
            except Empty:
                self._look()
                continue
            began_ns = perf_counter_ns()
            if isinstance(job, GivePart):
                self._give(job)
                continue
            try:
                reply = self._do(job, plain)
                reply = reply._replace(took_us=(perf_counter_ns() - began_ns) // 1000)
            except Exception as error:  # whatever it was: it is a miss, and the engine goes on
                _log.error("copy job failed", tier=self.name, job=type(job).__name__, error=repr(error))
                reply = self._reply(job.number)
            finally:
                if held is not None:
                    held.close()
            self._results.append(reply)
            self._look()

    def _pause_seconds(self) -> float:
        """Return how long the thread may wait for the next job: 0 where more must be ended now."""
        is_due = self.tier is not None and self.tier.is_due(self._clock.now_us())
        return 0.0 if is_due else _LOOK_SECONDS

    def _give(self, asked: GivePart) -> None:
        given = GivenObjects()
        try:
            self._watch.look()
            if self.tier is not None:
                part = asked.part
                given = self.tier.give(received(part.label), part.keys, part.first)
        except Exception as error:
            _log.error("copies not given", tier=self.name, error=repr(error))
        asked.answer.put(given)

    def _look(self) -> None:
        """End what is due, at intervals (rule 5)."""
        if self.tier is None or not self.tier.is_due(self._clock.now_us()):
            return
        try:
            self.tier.expire()
        except Exception as error:
            _log.error("copies not ended", tier=self.name, error=repr(error))
        events = tuple(self.tier.take_events())
        if events:
            self._results.append(CopyReply(0, self.name, self.terms.shard, events, counts=self.tier.counts))

    def _do(self, job: CopyJob | KeepCopies, plain: memoryview | None) -> CopyReply:
        self._watch.look()
        tier = self.tier
        if isinstance(job, OpenTier):
            self._open(job)
            opened = OpenedTier(self.terms.layout, self.buffers, self.store.capacity_bytes, self._keys.shred.returned)
            return self._reply(job.number, opened=opened)
        if isinstance(job, CloseTier):
            return self._close(job)
        if tier is None:
            return self._reply(job.number)
        restored: tuple[Restored, ...] = ()
        erased: TierErased | None = None
        if isinstance(job, ProbeCopy):
            return self._reply(job.number)._replace(probed=tier.probe())
        if isinstance(job, CompareCopies):
            found = self._compare(tier)  # before the answer, which tells what it ended
            return self._reply(job.number)._replace(found=found)
        if isinstance(job, KeepCopies):
            fetch, fetched = job.fetch, job.fetched
            label = received(fetch.label)
            if job.narrowed == self.narrowed:  # else its rule may be wider than the one that holds now
                self._learn((label.tenant, label.classification), fetch.rule)
            blocks = tier.receive(label, fetch.keys, fetched.objects)
            size = sum(len(one.data) for one in fetched.objects)
            return self._reply(job.number)._replace(fetched=FetchedCopies(blocks, size, fetched.reason))
        if isinstance(job, SeekCopies):
            return self._reply(job.number)._replace(sought=self._seek(tier, job))
        if isinstance(job, EraseReturned):
            returned = _despite_other_shards(lambda: tier.erase_returned(job.complete))
            return self._reply(job.number)._replace(returned_keys=returned)
        match job:
            case StoreCopy():
                self._store(tier, job, plain)
            case LoadCopies():
                restored = self._load(tier, job)
            case EraseCopies():
                erased = _despite_other_shards(lambda: tier.erase(job.erasure, job.selector, job.before_us))
            case DestroyCopies():
                tier.destroy(job.names)
            case ForgetTenant():
                tier.end_tenant(job.tenant)
            case NarrowCopies():
                self._rule(job.rules)
                tier.narrow()
            case ExpireCopies():
                tier.expire()
        return self._reply(job.number, restored=restored, erased=erased)

    def _reply(
        self,
        number: int,
        *,
        restored: tuple[Restored, ...] = (),
        erased: TierErased | None = None,
        opened: OpenedTier | None = None,
    ) -> CopyReply:
        tier, shard = self.tier, self.terms.shard
        if tier is None:
            return CopyReply(number, self.name, shard, (), restored, erased, opened)
        events = tuple(tier.take_events())
        return CopyReply(number, self.name, shard, events, restored, erased, opened, tier.counts)

    def _open(self, job: OpenTier) -> None:
        self._rule(job.rules)
        tenants = tuple(sorted({tenant for tenant, _ in job.rules}))
        self.terms = self.terms._replace(
            block_tokens=job.block_tokens,
            limit=self._limit,
            share=self._share,
            tenants=tenants,
            holder=job.holder,
        )
        self.tier = SealedTier(self.store, self._seal_keys, self._keys.shred, self.staging, self._clock, self.terms)

    def _limit(self, tenant: str, classification: str) -> CopyLimit:
        rule = self._rules.get((tenant, classification))
        return NOT_HERE if rule is None else rule.limit

    def _share(self, tenant: str) -> TierShare:
        return self._shares.get(tenant, _NO_SHARE)

    def _rule(self, rules: Rules) -> None:
        self._rules, self._shares = {}, {}
        for whose, rule in rules.items():
            self._learn(whose, rule)

    def _learn(self, whose: tuple[str, str], rule: CopyRule) -> None:
        if len(self._rules) >= _RULES_MAX:
            self._rules.clear()
            self._shares.clear()
        self._rules[whose] = rule
        self._shares[whose[0]] = rule.share

    def _store(self, tier: SealedTier, job: StoreCopy, plain: memoryview | None) -> None:
        if plain is None:  # no buffer was free: it is not kept
            return
        label, size = received(job.run.label), self._blocks.block_bytes
        self._learn((label.tenant, label.classification), job.rule)

        def read(first: int, count: int, into: memoryview) -> None:
            into[:] = plain[first * size : (first + count) * size]

        tier.store(job.run._replace(label=label), read)

    def _seek(self, tier: SealedTier, job: SeekCopies) -> tuple[SoughtCopy, ...]:
        """Find all that continues with full attention, and with windows what a hit ending at the last place needs."""
        label = received(job.label)
        self._learn((label.tenant, label.classification), job.rule)
        sought: dict[tuple[int, int], SoughtCopy] = {}

        def ends(chain: SoughtChain, depth: int, until: int | None = None) -> list[int]:
            keys = bytes(KEY_BYTES * job.first) + chain.keys
            reached = []
            for found in tier.lookup(label, keys if until is None else keys[: KEY_BYTES * until], depth):
                copy = tier.copy(found.name)
                if copy is None:
                    break
                depth += found.blocks
                reached.append(depth)
                place = (chain.group.number, depth)
                sought[place] = SoughtCopy(*place, copy.blocks, copy.size, copy.since_us, copy.due_us)
            return reached

        windows = [chain for chain in job.chains if chain.group.window_blocks is not None]
        whole = [set(ends(chain, job.depth)) for chain in job.chains if chain not in windows]
        common = [end for end in sorted(set.intersection(*whole), reverse=True) if end <= job.last]
        for until in common[:_ENDS_SOUGHT] if windows else ():
            if all(until in ends(one, one.group.first_needed(job.depth, until), until) for one in windows):
                break
        return tuple(sought.values())

    def _load(self, tier: SealedTier, job: LoadCopies) -> tuple[Restored, ...]:
        loaded: list[Restored] = []
        for part in job.parts:
            brought = self._load_part(tier, received(part.label), part)
            loaded += brought
            if sum(one.blocks for one in brought) < len(part.blocks):
                break
        return tuple(loaded)

    def _load_part(self, tier: SealedTier, label: DomainLabel, part: LoadPart) -> list[Restored]:
        size, wanted = self._blocks.block_bytes, len(part.blocks)
        keys = bytes(KEY_BYTES * part.first) + part.keys

        def write(depth: int, count: int, skip: int, data: memoryview) -> None:
            first = depth - part.depth
            targets = part.blocks[first : first + count]
            self._blocks.write(targets, data[skip * size : (skip + len(targets)) * size])

        found = tier.lookup(label, keys, part.depth)
        loaded, count = [], 0
        for one in tier.load(label, keys, part.depth, found, write):
            loaded.append(one._replace(blocks=min(one.blocks, wanted - count)))
            count += one.blocks
            if count >= wanted:
                break
        return loaded

    def _compare(self, tier: SealedTier) -> tuple[Finding, ...]:
        """Return the findings of a scan of this worker's own part, each repaired."""
        repaired = repair_all(tier_findings([tier], self._clock.now_us()))
        if self.terms.shards > 1:
            where = f", shard {self.terms.shard}"
            repaired = tuple(one._replace(cause=one.cause + where) for one in repaired)
        return repaired

    def _close(self, job: CloseTier) -> CopyReply:
        self._is_over = True
        if self.tier is not None:
            self.tier.close()
        else:
            self.store.close()
        self._seal_keys.close()
        self.staging.close()
        return self._reply(job.number)


def _despite_other_shards(erase: Callable[[], T]) -> T:
    """Run `erase`, and repeat it where another shard destroyed a key between our look and our own end of it."""
    try:
        return erase()
    except KeyringError:
        return erase()


class _StoreOf(NamedTuple):
    """The owner of a store: one of that many shards of this worker, with blocks of that many bytes."""

    worker: str
    shard: int
    shards: int
    block_bytes: int


def _open_store(tier: str, plan: TierPlan, whose: _StoreOf, clock: Clock) -> TierStore:
    """Return the store for one tier of one shard.

    Raises:
        ConfigError: names the setting.
    """
    worker, shard, shards, block_bytes = whose
    if tier == "host":
        return open_host_arena(plan.host_bytes)
    if tier == "remote":
        assert plan.remote is not None
        remote = plan.remote._replace(capacity_bytes=plan.remote.capacity_bytes // shards)
        largest = object_bytes(plan.object_blocks * block_bytes, enclosed=True, checked=False)
        return open_remote(remote, worker=worker, object_bytes_max=largest, clock=clock, shard=shard)
    folder = plan.nvme_path
    assert folder is not None
    try:
        private_folder(folder)
    except OSError as error:
        raise ConfigError(f"setting `nvme_tier_path`: `{folder}` cannot be made ({error.strerror})") from None
    store = FileStore(folder / f"shard-{shard}", plan.nvme_bytes)
    return GuardedStore(store, seconds=plan.timeout_seconds, clock=clock)


# A worker's blocks as bytes, one block after the other.
#
#     bytes_of.read(blocks, into)               # `into` holds the blocks, each with all its layers
#     bytes_of.write(blocks, data)
#
# On a device both calls wait, for earlier work on the device and for the copy.


class BlockBytes:
    """A worker's blocks as bytes, one block after the other."""

    def __init__(self, memory: TensorMemory) -> None:
        self._memory = memory
        self.block_bytes = memory.bytes_per_block
        self.pin = memory.pin
        table = memory.tables[0]
        self._device = table.device

    def layout(self, *facts: str) -> bytes:
        """Return 32 bytes that differ where the meaning of a block's bytes differs."""
        hashed = hashlib.blake2b(digest_size=32)
        for segment in self._memory.tables[0].segments:
            hashed.update(segment.piece_bytes.to_bytes(8, "little"))
        for tensor in self._memory.tables[0].tensors:
            hashed.update(f"{tensor.dtype} {tuple(tensor.shape[1:])}\0".encode())
        for fact in facts:
            hashed.update(fact.encode() + b"\0")
        return hashed.digest()

    def read(self, blocks: list[int], into: memoryview) -> None:
        """Copy `blocks` into memory of exactly their size."""
        self._wait()
        self._memory.read(0, np.array(blocks, dtype=np.int64), into)

    def write(self, blocks: list[int], data: memoryview) -> None:
        """Copy what `read` made into `blocks`."""
        self._wait()
        self._memory.write(0, np.array(blocks, dtype=np.int64), data)
        self._wait()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
