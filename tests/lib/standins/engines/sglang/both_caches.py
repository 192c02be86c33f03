"""SGLang's own radix cache and ours in one process, each over pools, an allocator and requests of SGLang's own classes.

`CacheBench` makes the calls on a prefix cache that SGLang's scheduler makes, through SGLang's own functions where there
are some; it computes nothing. `own_bench` and `governed_bench` make the two that are compared.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, evict_from_tree_cache, release_kv_cache
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from kvcustody.allocator.external.pool import ExternalPool
from kvcustody.clock import VirtualClock
from kvcustody.governance.external.engine_port import EnginePort
from kvcustody.governance.identity.principal import identify
from kvcustody.integrations.sglang.page_allocator import govern_allocator
from kvcustody.integrations.sglang.page_memory import PageMemory
from kvcustody.integrations.sglang.page_tree import PageTree
from kvcustody.integrations.sglang.radix_cache import ATTRIBUTE, GovernedRadixCache
from kvcustody.testkit.conformance.deployment import KeepingLedger, keyring, table, toy_model
from kvcustody.testkit.conformance.policy import policy

ROWS, CONTEXT, MAX_NEW = 32, 512, 8
ALONE = policy().replace("guaranteed: 25%, cap: 75%", "guaranteed: 0%, cap: 100%")  # one tenant may have everything
assert "cap: 75%" not in ALONE


class CacheSizes(NamedTuple):
    """What SGLang's scheduler asks a cache and an allocator for, in slots."""

    available: int
    evictable: int
    protected: int
    total: int


def configure(model: Path) -> None:
    """SGLang's own functions ask a process-wide configuration."""
    set_global_server_args_for_scheduler(
        ServerArgs(
            model_path=str(model),
            device="cpu",
            attention_backend="torch_native",
            sampling_backend="pytorch",
            grammar_backend="none",
            dtype="float32",
            disable_overlap_schedule=True,
        )
    )


class CacheBench:
    """One cache with what it works on."""

    cache: BasePrefixCache

    def __init__(self, slots: int, page_size: int) -> None:
        self.page_size = page_size
        pool = MHATokenToKVPool(
            size=slots,
            page_size=page_size,
            dtype=torch.float32,
            head_num=1,
            head_dim=4,
            layer_num=1,
            device="cpu",
            enable_memory_saver=False,
        )
        terms = (torch.float32, "cpu", pool, False)
        self.allocator = (
            TokenToKVPoolAllocator(slots, *terms)
            if page_size == 1
            else PagedTokenToKVPoolAllocator(slots, page_size, *terms)
        )
        self.pool = pool
        self.rows = ReqToTokenPool(ROWS, CONTEXT, "cpu", False)
        self.params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page_size,
        )
        self.waiting: dict[str, Req] = {}
        self.running: dict[str, Req] = {}

    # -- what a governed cache is told besides --------------------------------------------------------------------

    def came(self, req: Req) -> None:
        """A request has come."""

    def begins(self, req: Req) -> None:
        """It was taken, and holds what it found."""

    def computes(self) -> None:
        """A step is about to write."""

    # -- SGLang's moves -------------------------------------------------------------------------------------------

    def ask(self, rid: str, tokens: list[int]) -> None:
        """A request comes."""
        req = Req(rid, "", array("q", tokens), SamplingParams(max_new_tokens=MAX_NEW))
        self.came(req)
        self.waiting[rid] = req

    def start(self, rid: str, tokens: int) -> int:
        """Take a waiting request and compute its first chunk; what it found, -1 where there is no room."""
        req, cache = self.waiting[rid], self.cache
        req.init_next_round_input(cache)
        hit, total = req.prefix_len, len(req.full_untruncated_fill_ids)
        lock = cache.lock(req.last_node)
        until = min(hit + tokens, total)
        need = self._pages(until) - self._pages(hit)
        if need * self.page_size > self.allocator.available_size() + cache.evictable_size():
            cache.unlock(lock)
            return -1
        req.lock = lock
        self.begins(req)
        self.rows.alloc([req])
        if hit:
            self.rows.write((req.kv.req_pool_idx, slice(0, hit)), cache.prefix_device_indices(req).to(torch.int32))
        req.kv.kv_allocated_len = hit
        self.running[rid] = self.waiting.pop(rid)
        assert self._extend(req, until)
        checkpoint_kv_cache(req, cache)
        self._sample(req)
        return hit

    def go_on(self, rid: str, tokens: int) -> bool:
        """Its next chunk, or its next token; False where there is no room."""
        req = self.running[rid]
        total = len(req.full_untruncated_fill_ids)
        if req.prefix_len < total:
            req.init_next_round_input()
            if not self._extend(req, min(req.prefix_len + tokens, total)):
                return False
            checkpoint_kv_cache(req, self.cache)
            self._sample(req)
            return True
        if len(req.output_ids) >= MAX_NEW:
            return True
        if not self._extend(req, req.kv.kv_allocated_len + 1):
            return False
        req.output_ids.append(400 + len(req.output_ids))
        return True

    def finish(self, rid: str) -> None:
        """It is over: what it computed stays as far as the cache keeps it."""
        req = self.running.pop(rid)
        req.finished_reason = FINISH_LENGTH(len(req.output_ids))
        release_kv_cache(req, self.cache, checkpoint=True)

    def preempt(self, rid: str) -> None:
        """Its row is given back, and it waits to be computed again."""
        req = self.running.pop(rid)
        release_kv_cache(req, self.cache, checkpoint=False)
        req.reset_for_retract()
        self.waiting[rid] = req

    def evict(self, slots: int) -> None:
        """As before an allocation that finds too little."""
        evict_from_tree_cache(self.cache, slots)

    def sizes(self) -> CacheSizes:
        """By the cache's and the allocator's own words."""
        cache = self.cache
        return CacheSizes(
            self.allocator.available_size(),
            cache.evictable_size(),
            cache.protected_size(),
            cache.total_size(),
        )

    def _extend(self, req: Req, until: int) -> bool:
        """Slots for it up to a place, from what is free or is evicted for it."""
        size, kv = self.page_size, req.kv
        pages = self._pages(until) - self._pages(kv.kv_allocated_len)
        if pages:
            evict_from_tree_cache(self.cache, pages * size)
            slots = self.allocator.alloc(pages * size)
            if slots is None:
                return False
            begin = self._pages(kv.kv_allocated_len) * size
            self.rows.write((kv.req_pool_idx, slice(begin, begin + len(slots))), slots.to(torch.int32))
        kv.kv_allocated_len = kv.kv_committed_len = req.extend_end = until
        self.computes()
        return True

    def _sample(self, req: Req) -> None:
        """The first token, when the whole prompt is computed."""
        if req.extend_end == len(req.full_untruncated_fill_ids):
            req.output_ids.append(400 + len(req.output_ids))

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)


class OwnBench(CacheBench):
    """SGLang's own cache."""

    def __init__(self, slots: int, page_size: int) -> None:
        super().__init__(slots, page_size)
        self.cache = RadixCache(self.params)


class GovernedBench(CacheBench):
    """Ours, under a policy that lets its only tenant have everything."""

    cache: GovernedRadixCache

    def __init__(self, slots: int, page_size: int) -> None:
        super().__init__(slots, page_size)
        govern_allocator(self.allocator)
        pages = slots // page_size + 1
        memory = PageMemory(self.pool, pages, page_size)
        self.clock = VirtualClock()
        model: Any = SimpleNamespace(identity=toy_model(page_size), reloaded=lambda: None)
        self.cache = GovernedRadixCache(self.params, model, memory, PageTree(memory.pages, page_size))
        self.cache.scheduler = SimpleNamespace(
            collect_inflight_reqs=lambda: list(self.running.values()),
            waiting_queue=self.waiting.values(),
            chunked_req=None,
        )
        self.custody = self.cache.custody
        self.custody.port = self.port = EnginePort(
            ExternalPool(memory.pages, reserved=(0, *range(pages, memory.pages))),
            self.custody,
            table(ALONE),
            keyring(self.clock),
            KeepingLedger(),
            clock=self.clock,
            block_tokens=page_size,
        )
        self.custody.step()

    def came(self, req: Req) -> None:
        """See `CacheBench`; the door and the token are another test's."""
        who = identify(issuer="idp", tenant="alpha", verified={"subject": "ann"})
        tokens = req.origin_input_ids
        made = self.custody.admit(req.rid, who, self.cache.model.identity, tokens, max_tokens=MAX_NEW)
        setattr(req, ATTRIBUTE, made)
        self.cache._requests[req.rid] = req

    def begins(self, req: Req) -> None:
        """See `CacheBench`."""
        assert self.cache.may_start(req)
        self.cache.begin(req)

    def computes(self) -> None:
        """See `CacheBench`."""
        self.custody.step()

    def problems(self) -> list[str]:
        """What the port's books, the scan and the tree do not agree about."""
        found = self.port.check() + [str(one) for one in self.port.scan()]
        if (self.cache.tree.indexed() != self.port.pool.indexed).any():
            found.append("the tree and the port's books list other pages")
        return found
