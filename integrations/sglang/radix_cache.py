"""The registered backend: `SlotCustody` over a `PageTree` answers SGLang's calls to its prefix cache.

1. A request that was never admitted finds nothing and leaves nothing.
2. Every page that the scheduler gives back passes through here, and is reported before it is free.
3. A request is locked to the tree by SGLang's own calls. A page taken out under a lock becomes free with it.
4. Copies that tiers have behind a hit are reported in the way of SGLang's own host tier. They are loaded when the
   scheduler has taken the request (`init_load_back`). Either all of them come, or SGLang asks again and computes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.disaggregation.utils import prepare_abort
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InitLoadBackParams,
    MatchPrefixParams,
    MatchResult,
    TreeLock,
)

from kvcustody.allocator.external.scrub_queue import ScrubOrder
from kvcustody.errors import ConfigError, IdentityError
from kvcustody.governance.admission_outcome import AdmissionRefused
from kvcustody.governance.credentials.scope_token import ScopeTokens, VerifiedToken
from kvcustody.governance.request import NO_HINTS
from kvcustody.integrations.content.custom_params import take_custom
from kvcustody.integrations.sglang.model_identity import LoadedModel
from kvcustody.integrations.sglang.page_allocator import page_ids
from kvcustody.integrations.sglang.page_memory import PageMemory
from kvcustody.integrations.sglang.page_tree import PageNode, Pages, PageTree
from kvcustody.integrations.sglang.slot_custody import SlotCustody
from kvcustody.integrations.sglang.slot_request import SlotRequest
from kvcustody.logger import get_logger

if TYPE_CHECKING:
    from kvcustody.governance.worker.engine_worker import EngineWorker

ATTRIBUTE = "kvcustody"  # on SGLang's Req
_RECEIPT = DecLockRefParams()
_ADDERS: dict[type, type] = {}
_log = get_logger(__name__)


class GovernedRadixCache(BasePrefixCache):  # type: ignore[misc]
    """The cache for `--radix-cache-backend kvcustody`. `open_custody` sets its port before the first request."""

    def __init__(self, params: Any, model: LoadedModel, memory: PageMemory, tree: PageTree) -> None:
        self.disable = False
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.page_size: int = params.page_size
        self.is_eagle = False
        self.device = torch.device(self.token_to_kv_pool_allocator.device)
        self.model = model
        self.memory = memory
        self.tree = tree
        self.custody = SlotCustody(self.tree, self)
        self.root_node = self.tree.root
        self.scheduler: Any = None
        self.worker: EngineWorker | None = None
        self.tokens: ScopeTokens | None = None
        self.tier_stack = ExitStack()  # what tiers hold open
        self._requests: dict[str, Any] = {}  # SGLang's, by id
        self._by_row: dict[int, SlotRequest] = {}
        rows = self.req_to_token_pool.req_to_token
        self._rows = rows.numpy() if rows.device.type == "cpu" else None  # the same memory
        self._offsets = np.arange(self.page_size, dtype=np.int64)
        self._nothing = torch.empty((0,), dtype=torch.int64, device=self.device)
        if params.enable_metrics:
            self.init_metrics_collector()

    # -- arrival ------------------------------------------------------------------------------------------------------

    def admit(self, req: Any) -> str | None:
        """Admit a new request by its identity; return the reason for a refusal, or None."""
        if getattr(req, "session", None) is not None or getattr(req, "session_id", None):
            return "kvcustody: sessions are not governed"
        if req.lora_id is not None:
            return "kvcustody: adapters are not governed"
        assert self.tokens is not None
        verified = self.tokens.verify(req.cache_salt)
        narrowed_by = req.extra_key or ""
        req.cache_salt = req.extra_key = None  # a token reaches no log, event or store
        principal, hints = None, NO_HINTS
        if isinstance(verified, VerifiedToken):
            principal, hints = verified.principal, verified.hints
        else:
            self.custody.port.attempts.note(verified.reason)
            _log.warning("no identity", request=req.rid, reason=verified.reason)
        tokens, carried = req.origin_input_ids, take_custom(req.sampling_params)
        try:
            answer = self.custody.admit(
                req.rid,
                principal,
                self.model.identity,
                tokens,
                hints=hints if principal is None else hints._replace(kinds=carried.kinds, latency=carried.latency),
                trace=carried.trace,
                max_tokens=max(0, int(req.sampling_params.max_new_tokens or 0)),
                keyed=_is_keyed(req),
                narrowed_by=narrowed_by,
            )
        except (ConfigError, IdentityError) as error:
            answer = AdmissionRefused(req.rid, error.message)
        if isinstance(answer, AdmissionRefused):
            _log.error("request refused", request=req.rid, reason=answer.reason)
            return f"kvcustody: {answer.reason}"
        setattr(req, ATTRIBUTE, answer)
        self._requests[req.rid] = req
        return None

    def refuse(self, req: Any, message: str) -> None:
        """Answer a request that has nothing in the engine."""
        prepare_abort(req, message, status_code=HTTPStatus.FORBIDDEN)
        self.scheduler.output_streamer.stream_output([req], req.return_logprob)

    def may_start(self, req: Any) -> bool:
        """Return whether the scheduler may take the request now; False: only this one waits."""
        request = _of(req)
        return request is not None and self.custody.may_start(request)

    def begin(self, req: Any) -> None:
        """Begin a request that the scheduler has taken, with its hit locked."""
        request = _of(req)
        if request is None:
            return
        self._by_row[id(req.kv)] = request
        if not request.has_begun:
            self.custody.begin(request, req.prefix_len // self.page_size)

    # -- SGLang's calls -----------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Drop the cache, as after new weights: nothing computed before may be reached."""
        self.custody.clear()
        self.weights_changed()

    def weights_changed(self) -> None:
        """Make everything computed before unreachable, whether SGLang drops its cache or not."""
        self.custody.part_waiting()
        self.model.reloaded()

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Return what the request may read, page by page."""
        request = _of(params.req) if params.req is not None else None
        node, pages, beyond = self.tree.root, np.empty(0, dtype=np.int64), 0
        if request is not None and len(params.key):
            node, pages = self.custody.look_up(request, params.key.token_ids, len(params.key) // self.page_size)
            beyond = self.custody.restorable(request)
        return MatchResult(
            device_prefix_len=len(pages) * self.page_size,
            last_device_node=node,
            last_host_node=node,
            best_match_node=node,
            host_hit_length=beyond * self.page_size,
        )

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, PageNode] | None:
        """Load into the tree what tiers have for a request that the scheduler has chosen (rule 4)."""
        req, size = params.req, self.page_size
        request = _of(req)
        if request is None or request.has_begun:
            return 0, req.last_node  # it was told of nothing
        pages, tokens = params.host_hit_length // size, req.full_untruncated_fill_ids
        allocator, custody = self.token_to_kv_pool_allocator, self.custody
        lacking = pages * size - allocator.available_size()
        if lacking > 0:
            custody.make_room(-(-lacking // size))
        custody.zero()
        if allocator.available_size() < pages * size or not custody.may_restore(request, tokens, pages):
            return 0, req.last_node
        slots = allocator.alloc(pages * size)
        if slots is None:
            return 0, req.last_node
        self._by_row[id(req.kv)] = request
        node = custody.restore(request, tokens, slots[::size].cpu().numpy().astype(np.int64) // size)
        if node is not None:
            return pages * size, node
        self._by_row.pop(id(req.kv), None)
        custody.preempted(request, req.origin_input_ids + req.output_ids)
        return None

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Add the request's computed pages to the tree; its row continues with the tree's pages."""
        request = _of(req)
        if request is None:
            return
        if req.output_ids:
            self.custody.first_token(request)
        tokens: array[int] = req.full_untruncated_fill_ids
        published = self.custody.publish(request, tokens, up_to // self.page_size)
        if published is None:
            return
        if len(published.adopted):
            start = published.first * self.page_size
            slots = self._slots(published.adopted)
            self.req_to_token_pool.write((req.kv.req_pool_idx, slice(start, start + len(slots))), slots)
        self.tree.lock(published.node)
        lock, req.lock = req.lock, TreeLock(published.node, _RECEIPT)
        req.last_node = published.node
        self.unlock(lock)
        req.kv.cache_protected_len = req.kv.cache_inserted_len = published.published * self.page_size
        self.free(published.returned)

    def free_kv_row(self, kv: Any, ranges: list[tuple[int, int]]) -> None:
        """Free the request's slots; the port is told first (rule 2)."""
        request = self._by_row.get(id(kv))
        if request is not None:
            self.custody.report(request)
        super().free_kv_row(kv, ranges)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        """Take note that the request's row is free and its lock is gone."""
        request = _of(req)
        if request is None:
            return
        self._by_row.pop(id(req.kv), None)
        if not req.finished():
            self.custody.preempted(request, req.origin_input_ids + req.output_ids)
            return
        self._requests.pop(req.rid, None)
        cause = "aborted" if isinstance(req.finished_reason, FINISH_ABORT) else "finished"
        self.custody.release(request, cause)

    def release_aborted_request(self, handle: Any) -> None:
        """End a request that was waiting."""
        req = self._requests.pop(handle.rid, None)
        request = _of(req) if req is not None else None
        if request is not None:
            self.custody.release(request, "aborted")

    def evict(self, params: EvictParams) -> EvictResult:
        """End unheld pages until that many slots are free."""
        pages = -(-params.num_tokens // self.page_size)
        return EvictResult(num_tokens_evicted=self.custody.make_room(pages) * self.page_size)

    def lock(self, node: PageNode) -> TreeLock:
        """Lock as SGLang does; its receipt has no content here."""
        self.tree.lock(node)
        return TreeLock(node, _RECEIPT)

    def unlock(self, lock: TreeLock | None) -> None:
        """Release a holder (rule 3)."""
        if lock is not None:
            self.free(self.tree.unlock(lock.node))

    def inc_lock_ref(self, node: PageNode) -> IncLockRefResult:
        """Hold the path to `node` for a request."""
        self.tree.lock(node)
        return IncLockRefResult()

    def dec_lock_ref(self, node: PageNode, params: DecLockRefParams | None = None) -> DecLockRefResult:
        """Release the path to `node` (rule 3)."""
        self.free(self.tree.unlock(node))
        return DecLockRefResult()

    def path_device_indices(self, node: PageNode) -> torch.Tensor:
        """Return the slots from the root to `node`."""
        pages = self.tree.path(node)
        return self._slots(pages) if len(pages) else self._nothing

    def _slots(self, pages: Pages) -> torch.Tensor:
        slots = pages if self.page_size == 1 else (pages[:, None] * self.page_size + self._offsets).reshape(-1)
        return page_ids(slots, self.device)

    def evictable_size(self) -> int:
        """Return the slots in the tree that no request holds."""
        return self.tree.evictable_pages * self.page_size

    def protected_size(self) -> int:
        """Return the slots that requests hold, and those that are withheld."""
        withheld = len(self.token_to_kv_pool_allocator.kvcustody_withheld)
        return (self.tree.held_pages + withheld) * self.page_size

    def total_size(self) -> int:
        """Return the number of slots in the tree."""
        return int(np.count_nonzero(self.tree.indexed())) * self.page_size

    def all_values_flatten(self) -> torch.Tensor:
        """Return the slots in the tree."""
        return self._slots(np.flatnonzero(self.tree.indexed()))

    def pretty_print(self) -> None:
        """Print the amounts only, without owners or content."""
        _log.info("tree", slots=self.total_size(), held=self.protected_size())

    def release_host_resources(self) -> None:
        """End all custody, because SGLang ends."""
        self.close()

    # -- EngineRows ---------------------------------------------------------------------------------------------------

    def pages_of(self, request_id: str, first: int) -> Pages:
        """See `EngineRows`."""
        kv = self._requests[request_id].kv
        size = self.page_size
        if not kv.holds_kv or kv.kv_allocated_len <= first * size:
            return np.empty(0, dtype=np.int64)
        where = (kv.req_pool_idx, slice(first * size, kv.kv_allocated_len, size))
        rows = self._rows
        row = self.req_to_token_pool.req_to_token[where].cpu().numpy() if rows is None else rows[where]
        pages: Pages = row.astype(np.int64)
        return pages if size == 1 else pages // size

    def tokens_of(self, request_id: str) -> int:
        """See `EngineRows`."""
        req = self._requests.get(request_id)
        return 0 if req is None else len(req.origin_input_ids) + len(req.output_ids)

    def free(self, pages: Pages) -> None:
        """See `EngineRows`."""
        if len(pages):
            self.token_to_kv_pool_allocator.free_page_ids(page_ids(pages, self.device))

    def end(self, request_ids: Sequence[str], cause: str) -> None:
        """See `EngineRows`: a waiting request at once, a running one at its next token, which nobody is sent."""
        message = f"kvcustody: {cause}"
        for request_id in request_ids:
            req = self._requests.get(request_id)
            if req is None or req.finished():
                continue
            _log.warning("request ended", request=request_id, cause=cause)
            if self.scheduler is not None and req in self.scheduler.waiting_queue:
                self.scheduler.waiting_queue.remove(req)
                self.release_aborted_request(req.cache_request_handle)
                self.refuse(req, message)
            else:
                req.to_finish = FINISH_ABORT(message, HTTPStatus.FORBIDDEN)

    def withhold(self, pages: Pages) -> None:
        """See `EngineRows`."""
        self.token_to_kv_pool_allocator.withhold(pages)

    def requests(self) -> frozenset[object]:
        """See `EngineRows`: what SGLang's own queues and batches have."""
        scheduler = self.scheduler
        known = {req.rid for req in scheduler.collect_inflight_reqs() if not req.finished()}
        known |= {req.rid for req in scheduler.waiting_queue}
        if scheduler.chunked_req is not None:
            known.add(scheduler.chunked_req.rid)
        return frozenset(known)

    def allocated(self) -> int:
        """See `EngineRows`."""
        return int(self.token_to_kv_pool_allocator.kvcustody_allocated)

    def scrub(self, order: ScrubOrder) -> None:
        """See `EngineRows`."""
        results, counted = self.memory.scrub(order)
        self.custody.port.scrubbed(order.number, 0, results, counted)

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End all custody and close the ledger; a second time changes nothing."""
        worker, self.worker = self.worker, None
        if worker is None:
            return
        with self.tier_stack:
            if self.custody.tiers is not None:
                self.custody.tiers.close()
            worker.close(self.scrub)
            self.memory.close()
            if self.custody.events is not None:
                self.custody.events.close()


def _of(req: Any) -> SlotRequest | None:
    found: SlotRequest | None = getattr(req, ATTRIBUTE, None)
    return found


def _is_keyed(req: Any) -> bool:
    """Return whether the request's token ids condition all of its KV."""
    return all(
        getattr(req, name, None) is None
        for name in ("multimodal_inputs", "input_embeds", "positional_embed_overrides", "token_type_ids")
    )


def governed_adder(own: type[Any]) -> type[Any]:
    """Return a subclass of SGLang's prefill adder: a request that must wait blocks no other, and a chosen one attaches
    its hit.
    """
    adder = _ADDERS.get(own)
    if adder is None:

        class GovernedPrefillAdder(own):  # type: ignore[misc]
            def add_one_req(self, req: Any, *given: Any, **named: Any) -> Any:
                if not self.tree_cache.may_start(req):
                    return AddReqResult.CONTINUE  # the next one's turn
                return super().add_one_req(req, *given, **named)

            def _commit_prefill_admission(self, req: Any, *given: Any, **named: Any) -> None:
                super()._commit_prefill_admission(req, *given, **named)
                self.tree_cache.begin(req)

        adder = _ADDERS[own] = GovernedPrefillAdder
    return adder
