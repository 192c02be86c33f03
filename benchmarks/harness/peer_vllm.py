"""vLLM's own block manager as a peer: its Request, block hasher and KVCacheManager, without an engine.

1. The objects are built as EngineCore and Scheduler build them for one full-attention model: sha256 block
   hashing, prefix caching on, no speculative decoding, no connector, no KV events.
2. Whatever is optional and costs time is off (statistics, the full-length admission check, the block-id lists
   handed to workers), so the comparison errs in vLLM's favour.
"""

from __future__ import annotations

import os
from itertools import count
from time import thread_time_ns
from typing import NamedTuple

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

MAX_MODEL_TOKENS = 131_072
NULL_BLOCKS = 1  # vLLM keeps block 0 as a placeholder


class RequestPhases(NamedTuple):
    """Thread CPU time of one request's two halves."""

    hash_ns: int
    manager_ns: int


class DecodePhases(NamedTuple):
    """Thread CPU time of one decode step's two halves."""

    slots_ns: int
    append_ns: int


class VllmPeer:
    """One KVCacheManager of `pool_blocks` usable blocks."""

    def __init__(self, pool_blocks: int, block_tokens: int) -> None:
        spec = FullAttentionSpec(block_size=block_tokens, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
        config = KVCacheConfig(
            num_blocks=pool_blocks + NULL_BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(layer_names=["attention"], kv_cache_spec=spec)],
        )
        hash_function = get_hash_fn_by_name("sha256")
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(block_tokens, hash_function)
        self._manager = KVCacheManager(
            kv_cache_config=config,
            max_model_len=MAX_MODEL_TOKENS,
            scheduler_block_size=block_tokens,
            hash_block_size=block_tokens,
        )
        self._sampling = SamplingParams(max_tokens=MAX_MODEL_TOKENS)
        self._numbers = count()
        self._running: list[Request] = []

    def run_request(self, tokens: list[int]) -> int:
        """Hash, look up, allocate, publish, free; returns the tokens that hit."""
        return self._serve(self._build(tokens))

    def phases(self, tokens: list[int]) -> RequestPhases:
        """The same request with its halves timed apart."""
        start = thread_time_ns()
        request = self._build(tokens)
        hashed = thread_time_ns()
        self._serve(request)
        return RequestPhases(hashed - start, thread_time_ns() - hashed)

    def warm(self, tokens: list[int]) -> None:
        """Leave `tokens` cached and unreferenced."""
        self.run_request(tokens)

    def cached_blocks(self) -> int:
        """Keys in the prefix index."""
        return len(self._manager.block_pool.cached_block_hash_to_block)

    def drain(self, *, whole: bool = False) -> int:
        """Nothing is queued: KV events are off."""
        return 0

    def decode_setup(self, prompts: list[list[int]]) -> None:
        """Start one running sequence per prompt, with its first output token sampled."""
        for tokens in prompts:
            request = self._build(tokens)
            hit, _ = self._allocate(request)
            request.num_computed_tokens = len(tokens)
            request.append_output_token_ids(0)
            assert hit == 0
            self._running.append(request)

    def decode_step(self, tokens: list[int]) -> None:
        """Slots for each sequence's last token, then the newly sampled tokens with their block hashes."""
        self._extend()
        self._append(tokens)

    def decode_phases(self, tokens: list[int]) -> DecodePhases:
        """The same step with its halves timed apart."""
        start = thread_time_ns()
        self._extend()
        extended = thread_time_ns()
        self._append(tokens)
        return DecodePhases(extended - start, thread_time_ns() - extended)

    def _build(self, tokens: list[int]) -> Request:
        return Request(str(next(self._numbers)), tokens, self._sampling, None, block_hasher=self._hasher)

    def _allocate(self, request: Request) -> tuple[int, int]:
        blocks, hit, _ = self._manager.get_computed_blocks(request)
        new = request.num_tokens - hit
        allocated = self._manager.allocate_slots(request, new, hit, blocks)
        assert allocated is not None, "the pool is too small for this point"
        return hit, new

    def _serve(self, request: Request) -> int:
        hit, _ = self._allocate(request)
        self._manager.free(request)
        return hit

    def _extend(self) -> None:
        allocate = self._manager.allocate_slots
        self._manager.new_step_starts()
        for request in self._running:
            if allocate(request, 1) is None:
                raise RuntimeError("the pool is too small for this decode")
            request.num_computed_tokens += 1

    def _append(self, tokens: list[int]) -> None:
        for request, token in zip(self._running, tokens, strict=True):
            request.append_output_token_ids(token)
