"""Eyes inside SGLang's scheduler process, for tests only: loaded as an SGLang plugin, called through its RPC.

- Before the model computes a step, every slot that the step will write is read back. What is not zero then was
  somebody's, and is about to become somebody else's.
- Answers are JSON in a file that the caller names: SGLang's RPC has no answers.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

_written = {"slots": 0, "soiled": 0, "steps": 0, "retracted": 0}
_released = threading.Event()  # of reads that a slow disk holds
_spent = {
    "scheduler_ns": 0,
    "forward_ns": 0,
    "scrub_ns": 0,
    "tier_ns": 0,
}  # CPU time of the scheduler's thread, and of the model in it


def register() -> None:
    """SGLang's plugin hook: one more method of the scheduler, and a look before each step."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler

    from standins.engines.releases.tried_release import widen

    if hasattr(Scheduler, "probe"):
        return
    widen("sglang")
    Scheduler.probe = _probe
    if os.environ.get("SGLANG_PROBE_BLIND"):
        from sglang.srt.plugins.hook_registry import HookRegistry

        applies = HookRegistry.apply_hooks.__func__
        HookRegistry.apply_hooks = classmethod(lambda cls: (applies(cls), time_scheduler())[0])  # around all hooks
        return
    runs, retracts = Scheduler.run_batch, ScheduleBatch.retract_decode

    @functools.wraps(runs)
    def run_batch(self: Any, batch: Any, *given: Any, **named: Any) -> Any:
        if batch.out_cache_loc is not None:
            _written["slots"] += len(batch.out_cache_loc)
            _written["soiled"] += _soiled(self, batch.out_cache_loc)
        _written["steps"] += 1
        return runs(self, batch, *given, **named)

    def retract_decode(self: Any, *given: Any, **named: Any) -> Any:
        _written["retracted"] += 1
        return retracts(self, *given, **named)

    Scheduler.run_batch, ScheduleBatch.retract_decode = run_batch, retract_decode


def time_scheduler() -> None:
    """Count the CPU time of the scheduler's thread where it works for requests, without the model's (`_spent`)."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tp_worker import TpModelWorker

    def counted(name: str, works: Any) -> None:
        original = getattr(Scheduler, name)

        @functools.wraps(original)
        def call(self: Any, *given: Any, **named: Any) -> Any:
            began, inside = time.thread_time_ns(), _spent["forward_ns"]
            result = original(self, *given, **named)
            if works(result):
                _spent["scheduler_ns"] += time.thread_time_ns() - began - (_spent["forward_ns"] - inside)
            return result

        setattr(Scheduler, name, call)

    counted("process_input_requests", lambda result: True)
    counted("get_next_batch_to_run", lambda plan: plan.batch_to_run is not None)
    counted("run_batch", lambda result: True)
    counted("process_batch_result", lambda result: True)
    from kvcustody.integrations.sglang.page_memory import PageMemory
    from kvcustody.integrations.sglang.slot_tiers import SlotTiers

    def timed(owner: Any, method: str, name: str) -> None:
        original = getattr(owner, method)

        @functools.wraps(original)
        def call(self: Any, *given: Any, **named: Any) -> Any:
            began = time.thread_time_ns()
            result = original(self, *given, **named)
            _spent[name] += time.thread_time_ns() - began
            return result

        setattr(owner, method, call)

    timed(PageMemory, "scrub", "scrub_ns")
    timed(TpModelWorker, "forward_batch_generation", "forward_ns")
    for method in ("offer", "plan", "bring"):
        timed(SlotTiers, method, "tier_ns")


def _soiled(scheduler: Any, slots: torch.Tensor) -> int:
    """How many of these slots hold anything."""
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    found = torch.zeros(len(slots), dtype=torch.bool)
    for tensor in (*pool.k_buffer, *pool.v_buffer):
        found |= tensor[slots].flatten(1).ne(0).any(1)
    return int(found.sum())


def _probe(self: Any, name: str, answer: str, given: dict[str, Any] | None = None) -> None:
    result = _ANSWERS[name](self, **(given or {}))
    Path(answer).write_text(json.dumps(result))


def _port(scheduler: Any) -> Any:
    return scheduler.tree_cache.custody.port


def _free(scheduler: Any) -> dict[str, int]:
    allocator = scheduler.token_to_kv_pool_allocator
    size = allocator.page_size
    pages = allocator.get_all_free_pages()
    slots = (pages[:, None] * size + torch.arange(size)).reshape(-1)
    every = torch.arange(allocator.size + size)
    return {
        "free": len(slots),
        "soiled": _soiled(scheduler, slots),
        "soiled_anywhere": _soiled(scheduler, every),
        "slots": allocator.size,
    }


def _erase(scheduler: Any, **selector: Any) -> dict[str, Any]:
    from kvcustody.governance.erasure.selector import Selector

    port = _port(scheduler)
    erased = port.erase(Selector(**selector))
    scheduler.tree_cache.custody.step()
    return {
        "blocks": erased.ended_blocks,
        "remaining": erased.remaining_blocks,
        "erasure": erased.erasure,
    }


def _scan(scheduler: Any, recover: bool = False) -> list[str]:
    cache = scheduler.tree_cache
    found = cache.worker.recover().findings if recover else cache.custody.port.scan()
    return [f"{one.orphan}: {one.cause}, blocks {list(one.blocks)[:8]}" for one in found]


def _check(scheduler: Any) -> list[str]:
    problems: list[str] = _port(scheduler).check()
    cache = scheduler.tree_cache
    ours, theirs = _port(scheduler).pool.indexed, cache.tree.indexed()
    if (ours != theirs).any():
        problems.append(f"pages {np.flatnonzero(ours != theirs)[:8].tolist()} are indexed on one side alone")
    return problems


def _stats(scheduler: Any) -> dict[str, Any]:
    stats = _port(scheduler).stats()
    pool = stats.pools[0]
    return {
        "by_state": dict(pool.by_state),
        "evicted": dict(pool.evicted),
        "scrubbed": list(pool.scrubbed),
        "allocated": pool.allocated,
        "residencies": pool.residencies,
        "tenants": {
            name: {"requests": one.requests, "hit_blocks": one.hit_blocks, "deferred": dict(one.deferred)}
            for name, one in stats.tenants.items()
        },
    }


def _activate(scheduler: Any, policy: str, revision: int) -> str:
    from kvcustody.policies.reading.load_policy import load_policy
    from kvcustody.policies.table.compile import compile_policy

    table = compile_policy(load_policy(policy, name="activated.yaml"), revision=revision)
    _port(scheduler).activate(table, actor="tests")
    return str(table.digest)


def _declare(scheduler: Any, owner: str, tokens: list[int]) -> dict[str, Any]:
    """What a policy says of a segment of this engine's model, made with the secret of its owner."""
    from kvcustody.governance.decisions.segment_matcher import declare
    from kvcustody.governance.identity.domain_spec import tenant_owner

    cache = scheduler.tree_cache
    segment = declare(
        _port(scheduler).keyring,
        tenant_owner("api-keys", owner),
        tokens,
        model=cache.model.identity.digest,
        block_tokens=cache.page_size,
    )
    return {"digest": segment.digest, "tokens": segment.tokens, "covered": segment.blocks * cache.page_size}


def _pid(scheduler: Any) -> int:
    return os.getpid()


def _held(scheduler: Any) -> dict[str, int]:
    cache = scheduler.tree_cache
    return {"evictable": cache.evictable_size(), "protected": cache.protected_size()}


def _indexed(scheduler: Any) -> list[tuple[str, int, list[int]]]:
    """Every page of the tree: its tenant, its domain, and every token up to its end."""
    tree, pool = scheduler.tree_cache.tree, _port(scheduler).pool
    chains, waiting = [], [(tree.root, list[int]())]
    while waiting:
        node, before = waiting.pop()
        whole = before + node.tokens.tolist()
        for at, page in enumerate(node.pages.tolist(), 1):
            tag = int(pool.tag[page])
            end = len(before) + at * tree.page_tokens
            chains.append((pool.domains[tag].owner.name, tag, whole[:end]))
        waiting += [(child, whole) for child in node.children.values()]
    return chains


def _conservation(scheduler: Any) -> list[str]:
    """The identities that do not hold between the ledger and the pool's own counters, at a quiet moment."""
    from kvcustody.audit.evidence.coverage.conservation import conservation
    from kvcustody.audit.store.database.engine import open_store

    cache = scheduler.tree_cache
    counts = cache.custody.port.counts()
    assert cache.worker.writer.flush()
    store = open_store(os.environ["KVCUSTODY_DATABASE_URL"])
    with store.connect() as connection:
        found = conservation(connection, cache.worker.writer.incarnation, counts)
    store.dispose()
    assert found, "nothing was compared"
    return [str(one) for one in found if one.difference]


def _tiers(scheduler: Any) -> dict[str, Any]:
    """By tier: copies, whose they are, and what it brought."""
    tiers = scheduler.tree_cache.custody.tiers
    by_tier = {}
    for way in tiers.transfers.ways:
        copies = way.tier.copies()
        by_tier[way.tier.name] = {
            "copies": len(copies),
            "tenants": sorted({copy.tenant for copy in copies}),
            "stored": way.link.stored_blocks,
            "restored": way.link.restored_blocks,
            "waiting": way.tier.counts.waiting,
            "ended": way.tier.counts.ended,
            "refused": way.tier.counts.refused,
            "is_asked": getattr(way.tier._index.store, "is_open", True),
        }
    return by_tier


def _copies_of(scheduler: Any, tenant: str) -> list[str]:
    """The names of a tenant's copies in the last tier."""
    tier = scheduler.tree_cache.custody.tiers.transfers.tiers[-1]
    return [copy.name.hex() for copy in tier.copies() if copy.tenant == tenant]


def _hurt_store(scheduler: Any, how: str) -> None:
    """From now on the stores fail, lose what they have, or return another object than is asked for; "": no longer."""
    from kvcustody.errors import StoreError

    for way in scheduler.tree_cache.custody.tiers.transfers.ways:
        store = way.tier._index.store
        way.tier._index.store = store._store if isinstance(store, _HurtStore) else store
        if how:
            way.tier._index.store = _HurtStore(way.tier, how, StoreError)


class _HurtStore:
    def __init__(self, tier: Any, how: str, error: type[Exception]) -> None:
        self._store, self._how, self._error = tier._index.store, how, error
        names = [copy.name for copy in tier.copies()]
        self._instead = {name: names[at - 1] for at, name in enumerate(names)}

    def prepare_load(self, name: bytes) -> Any:
        if self._how == "fails":
            raise self._error("the store does not answer")
        if self._how == "loses":
            return None
        return self._store.prepare_load(self._instead.get(name, name))

    def complete_load(self, name: bytes) -> None:
        self._store.complete_load(self._instead.get(name, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def _hurt_disk(scheduler: Any, how: str, seconds: float = 0.0) -> None:
    """The files behind the guard of the last tier: "": whole again, and what is read comes.

    `slow`: a read takes so many seconds, 0: until this is called again. `full`: no file is given room.
    """
    files = scheduler.tree_cache.custody.tiers.transfers.ways[-1].tier._index.store._store
    for name in ("prepare_load", "_allocate"):
        vars(files).pop(name, None)
    _released.set()
    if how == "slow":
        _released.clear()
        reads = files.prepare_load

        def read(name: bytes) -> Any:
            _released.wait(seconds or 120)
            return reads(name)

        files.prepare_load = read
    elif how == "full":

        def allocate(descriptor: int, size: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        files._allocate = allocate


def _mar(scheduler: Any, how: str) -> None:
    """For a positive control: from now on what leaves, or what came back, is not quite what was computed; "": it is.

    `sealed`: the last value of each page changes its sign before it is sealed. `opened`: that, behind the opening.
    `places`: each page goes to its neighbour's place.
    """
    tiers = scheduler.tree_cache.custody.tiers
    memory = tiers._memory
    tiers._memory = memory = memory.memory if isinstance(memory, _MarredPages) else memory
    if how:
        tiers._memory = _MarredPages(memory, how)


class _MarredPages:
    def __init__(self, memory: Any, how: str) -> None:
        self.memory, self._how = memory, how
        self.bytes_per_page = memory.bytes_per_page

    def read(self, pages: Any, into: memoryview) -> None:
        self.memory.read(pages, into)
        if self._how == "sealed":
            self._turn(into)

    def write(self, pages: Any, data: memoryview) -> None:
        if self._how == "opened":
            data = memoryview(bytearray(data))
            self._turn(data)
        self.memory.write(np.roll(pages, 1) if self._how == "places" else pages, data)

    def _turn(self, data: memoryview) -> None:
        values = np.frombuffer(data, dtype=np.float32).reshape(-1, self.bytes_per_page // 4)
        values[:, -1] *= -1


def _to_files(scheduler: Any) -> int:
    """What `host` has goes down to the next tier, as where it has no room; how many copies go."""
    tier = scheduler.tree_cache.custody.tiers.transfers.ways[0].tier
    rows = [row for _, row in tier._index.rows.names()]
    for row in rows:
        tier._hand_down(tier._index.rows.name(row), tier._index.rows.row(row))
    tier._ends.end(rows, "evicted")
    return len(rows)


def _open_to_anybody(scheduler: Any) -> None:
    """For a positive control: every domain's copies are named and sealed as those of the first that had one."""
    from kvcustody.integrations.sglang import slot_tiers

    tiers = scheduler.tree_cache.custody.tiers
    owners = [owner.label for way in tiers.transfers.ways for owner in way.tier._index.owners if owner.label]
    first, keys = owners[0], slot_tiers.SlotTiers._keys
    name = scheduler.tree_cache.custody.port.keyring.domains.state(first.spec).digest().hex()
    slot_tiers.label_of = lambda domain: first
    slot_tiers.SlotTiers._keys = lambda self, label, place, *given: keys(self, first, place._replace(name=name), *given)


_ANSWERS = {
    "activate": _activate,
    "check": _check,
    "conservation": _conservation,
    "copies_of": _copies_of,
    "declare": _declare,
    "erase": _erase,
    "free": _free,
    "held": _held,
    "hurt_disk": _hurt_disk,
    "hurt_store": _hurt_store,
    "indexed": _indexed,
    "mar": _mar,
    "open_to_anybody": _open_to_anybody,
    "pid": _pid,
    "scan": _scan,
    "spent": lambda scheduler: dict(_spent),
    "stats": _stats,
    "tiers": _tiers,
    "to_files": _to_files,
    "written": lambda scheduler: dict(_written),
}
