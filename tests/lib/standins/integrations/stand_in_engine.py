"""A stand-in for TensorRT-LLM: its connector's abstract classes, a block manager, and the documented order of calls.

Written after the documentation (`kv_cache_connector.py`, September 2026), it is not TensorRT-LLM. A token's KV is a
digest of all tokens up to it. A step's output is a digest of all KV that it reads. So a block with another's content,
or with none, changes the output.
"""

from __future__ import annotations

import hashlib
import sys
import types
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

LAYERS, WIDTH, BLOCK_TOKENS = 2, 16, 8


@dataclass
class RequestData:
    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int
    block_hashes: list[int] = field(default_factory=list)
    priorities: list[int] | None = None
    cache_salt: str | None = None


@dataclass
class SchedulerOutput:
    new_requests: list[RequestData] = field(default_factory=list)
    cached_requests: list[RequestData] = field(default_factory=list)


class KvCacheConnectorScheduler(ABC):
    def __init__(self, llm_args: object) -> None:
        self._llm_args = llm_args

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> object: ...
    @abstractmethod
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]: ...
    @abstractmethod
    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool: ...
    @abstractmethod
    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None: ...


class KvCacheConnectorWorker(ABC):
    def __init__(self, llm_args: object) -> None:
        self._llm_args = llm_args
        self._metadata: object = None

    def bind_connector_meta(self, metadata: object) -> None:
        self._metadata = metadata

    def get_connector_meta(self) -> object:
        return self._metadata

    def _clear_connector_meta(self) -> None:
        self._metadata = None

    @abstractmethod
    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None: ...
    @abstractmethod
    def start_load_kv(self, stream: Any) -> None: ...
    @abstractmethod
    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None: ...
    @abstractmethod
    def save_kv_layer(self, layer_idx: int, stream: Any) -> None: ...
    @abstractmethod
    def wait_for_save(self, stream: Any) -> None: ...
    @abstractmethod
    def get_finished(self, finished: list[int], started: list[int]) -> tuple[list[int], list[int]]: ...


class KvCacheRetentionConfig:
    class TokenRangeRetentionConfig:
        def __init__(
            self, token_start: int, token_end: int | None, priority: int, duration_ms: timedelta | None
        ) -> None:
            self.token_start, self.token_end = token_start, token_end
            self.priority, self.duration_ms = priority, duration_ms

    def __init__(
        self,
        token_range_retention_configs: list[Any],
        decode_retention_priority: int = 35,
        decode_duration_ms: timedelta | None = None,
        transfer_mode: object = None,
        directory: str = "",
    ) -> None:
        self.token_range_retention_configs = token_range_retention_configs
        self.decode_retention_priority = decode_retention_priority
        self.decode_duration_ms = decode_duration_ms
        self.transfer_mode, self.directory = transfer_mode, directory


def modules() -> dict[str, types.ModuleType]:
    """What stands for the package while a test runs."""
    base = "tensorrt_llm"
    names = (
        base, f"{base}._torch", f"{base}._torch.pyexecutor", f"{base}._torch.pyexecutor.connectors",
        f"{base}._torch.pyexecutor.connectors.kv_cache_connector", f"{base}.llmapi",
    )  # fmt: skip
    fakes = {name: types.ModuleType(name) for name in names}
    connector: Any = fakes[names[4]]
    connector.KvCacheConnectorScheduler, connector.KvCacheConnectorWorker = (
        KvCacheConnectorScheduler,
        KvCacheConnectorWorker,
    )
    api: Any = fakes[names[5]]
    api.KvCacheRetentionConfig = KvCacheRetentionConfig
    return fakes


def llm_args(**changed: Any) -> types.SimpleNamespace:
    """Arguments with which the connector starts; a name with a dot changes a part."""
    from kvcustody.integrations.tensorrt_llm.open_custody import MODULE, SCHEDULER_CLASS, WORKER_CLASS

    arguments = types.SimpleNamespace(
        model="stand-in",
        tensor_parallel_size=1,
        disable_overlap_scheduler=True,
        kv_cache_config=types.SimpleNamespace(
            tokens_per_block=BLOCK_TOKENS, enable_partial_reuse=False, enable_block_reuse=True, dtype="auto"
        ),
        kv_connector_config=types.SimpleNamespace(
            connector=None,
            connector_module=MODULE,
            connector_scheduler_class=SCHEDULER_CLASS,
            connector_worker_class=WORKER_CLASS,
        ),
    )
    for name, value in changed.items():
        *path, last = name.split("__")
        place: Any = arguments
        for part in path:
            place = getattr(place, part)
        setattr(place, last, value)
    return arguments


class LlmRequest:
    def __init__(self, request_id: int, tokens: list[int], salt: str | None, dummy: bool = False) -> None:
        self.request_id, self.cache_salt, self.is_dummy_request = request_id, salt, dummy
        self._tokens = tokens

    def get_tokens(self, beam: int) -> list[int]:
        return self._tokens


class Stream:
    def __init__(self) -> None:
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1


@dataclass
class Answer:
    """What a request got: its output, and where the KV of its prompt came from."""

    output: list[int]
    device_tokens: int
    connector_tokens: int
    computed_tokens: int


class StandInEngine:
    """`connector`: scheduler and worker; None: the plain engine. `salted`: whether its index keeps salts apart."""

    def __init__(
        self,
        connector: tuple[Any, Any] | None = None,
        *,
        blocks: int = 64,
        salted: bool = True,
        chunk_tokens: int = 1 << 20,
        partial: int = 0,
        counts_promised: bool = False,
    ) -> None:
        self.pool = torch.zeros((blocks, LAYERS, 2, BLOCK_TOKENS * WIDTH), dtype=torch.float16)
        self.scheduler, self.worker = connector or (None, None)
        self.salted, self.chunk_tokens, self.partial = salted, chunk_tokens, partial
        self.counts_promised = counts_promised  # as releases of 2025 did
        self.free = list(range(blocks))
        self.index: OrderedDict[tuple[Any, ...], int] = OrderedDict()
        self.events: list[dict[str, Any]] = []
        self.between: Callable[[], None] | None = None  # after the match, before the load
        self.stream, self._requests, self._event = Stream(), 0, 0
        if self.worker is not None:
            self.worker.register_kv_caches(self.pool)

    def run(self, prompt: list[int], salt: str | None = None, output: int = 4, dummy: bool = False) -> Answer:
        """One request from its arrival to its end."""
        self._requests += 1
        request = LlmRequest(self._requests, list(prompt), salt, dummy)
        held = self._match(prompt, salt)
        computed = len(held) * BLOCK_TOKENS + (self.partial if held else 0)
        external = 0
        if self.scheduler is not None:
            external, is_async = self.scheduler.get_num_new_matched_tokens(request, computed)
            assert not is_async
        needed = -(-(len(prompt) + output) // BLOCK_TOKENS)
        ids = held + [self._take() for _ in range(needed - len(held))]
        if self.scheduler is not None:
            self.scheduler.update_state_after_alloc(request, ids)
        if self.between is not None:
            self.between()
        answer = Answer([], computed, external, len(prompt) - computed - external)
        told_tokens = told_blocks = 0
        at, is_first = computed + external, True
        while len(answer.output) < output:
            count = min(self.chunk_tokens, len(request.get_tokens(0)) - at)
            tokens = request.get_tokens(0)
            promised = external if is_first and not self.counts_promised else 0
            data = RequestData(
                request.request_id,
                tokens[told_tokens:],
                ids[told_blocks:],
                at - promised,
                count,
                [self._hash(tokens, n, salt) for n in range(1, (at + count) // BLOCK_TOKENS + 1)],
                None,
                salt,
            )
            told_tokens, told_blocks = len(tokens), len(ids)
            said = self._step(data, is_first, request, ids, at, count)
            at, is_first = at + count, False
            if at == len(tokens):
                answer.output.append(said)
                tokens.append(said)
        if self.scheduler is not None:
            assert self.scheduler.request_finished(request, ids) is False
        self._finish(request.get_tokens(0), salt, ids, at)
        return answer

    def forget_device(self) -> None:
        """Every cached block is evicted, and its place is written over."""
        gone = [self._hash(list(key[1]), len(key[1]) // BLOCK_TOKENS, key[0]) for key in self.index]
        self.free += self.index.values()
        self.index.clear()
        self.pool[self.free] = 7.0
        if gone:
            self._tell({"type": "removed", "block_hashes": gone})

    def _step(self, data: RequestData, is_first: bool, request: LlmRequest, ids: list[int], at: int, count: int) -> int:
        worker = self.worker
        if worker is not None:
            step = SchedulerOutput([data], []) if is_first else SchedulerOutput([], [data])
            worker.bind_connector_meta(self.scheduler.build_connector_meta(step))
            worker.start_load_kv(self.stream)
        read = hashlib.sha256()
        for layer in range(LAYERS):
            if worker is not None:
                worker.wait_for_layer_load(layer, self.stream)
            for position in range(at, at + count):
                block, offset = ids[position // BLOCK_TOKENS], position % BLOCK_TOKENS * WIDTH
                row = kv_of(request.get_tokens(0)[: position + 1], layer)
                self.pool[block, layer, :, offset : offset + WIDTH] = row
            for position in range(at + count):
                block, offset = ids[position // BLOCK_TOKENS], position % BLOCK_TOKENS * WIDTH
                read.update(self.pool[block, layer, :, offset : offset + WIDTH].numpy().tobytes())
            if worker is not None:
                worker.save_kv_layer(layer, self.stream)
        if worker is not None:
            worker.wait_for_save(self.stream)
            assert worker.get_finished([], []) == ([], [])
            worker._clear_connector_meta()
        return int.from_bytes(read.digest()[:2], "big")

    def _match(self, prompt: list[int], salt: str | None) -> list[int]:
        held: list[int] = []
        for end in range(BLOCK_TOKENS, len(prompt), BLOCK_TOKENS):
            block = self.index.get(self._key(prompt[:end], salt))
            if block is None:
                break
            held.append(block)
        for end in range(BLOCK_TOKENS, BLOCK_TOKENS * len(held) + 1, BLOCK_TOKENS):
            del self.index[self._key(prompt[:end], salt)]  # in use: not to be evicted
        return held

    def _take(self) -> int:
        if not self.free:
            key, block = self.index.popitem(last=False)
            tokens = list(key[1])
            self._tell({"type": "removed", "block_hashes": [self._hash(tokens, len(tokens) // BLOCK_TOKENS, key[0])]})
            return block
        return self.free.pop()

    def _finish(self, tokens: list[int], salt: str | None, ids: list[int], computed: int) -> None:
        whole = computed // BLOCK_TOKENS
        stored = []
        for at in range(whole):
            key = self._key(tokens[: (at + 1) * BLOCK_TOKENS], salt)
            if key in self.index:
                self.free.append(ids[at])
            else:
                self.index[key] = ids[at]
                stored.append(at)
        self.free += ids[whole:]
        if stored:
            self._tell(
                {
                    "type": "stored",
                    "parent_hash": self._hash(tokens, stored[0], salt) if stored[0] else None,
                    "blocks": [
                        {
                            "type": "stored_block",
                            "block_hash": self._hash(tokens, at + 1, salt),
                            "tokens": [
                                {"type": "unique_token", "token_id": token, "token_extra_id": 0}
                                for token in tokens[at * BLOCK_TOKENS : (at + 1) * BLOCK_TOKENS]
                            ],
                            "cache_level": 0,
                            "priority": 35,
                        }
                        for at in stored
                    ],
                }
            )

    def _tell(self, data: dict[str, Any]) -> None:
        self.events.append({"event_id": self._event, "data": data, "window_size": 4096})
        self._event += 1

    def take_events(self) -> list[dict[str, Any]]:
        """As `get_kv_cache_events`."""
        events, self.events = self.events, []
        return events

    def _key(self, tokens: list[int], salt: str | None) -> tuple[Any, ...]:
        return (salt if self.salted else None, tuple(tokens))

    def _hash(self, tokens: list[int], blocks: int, salt: str | None) -> int:
        said = repr((salt, tokens[: blocks * BLOCK_TOKENS])).encode()
        return int.from_bytes(hashlib.sha256(said).digest()[:8], "big")


def kv_of(tokens: list[int], layer: int) -> torch.Tensor:
    """Keys and values of the last of these tokens in a layer."""
    digest = hashlib.blake2b(repr((tokens, layer)).encode(), digest_size=2 * WIDTH).digest()
    return torch.tensor(list(digest), dtype=torch.float16).view(2, WIDTH)


def uninstall() -> None:
    """Forget the stand-in, and our module that was made of its classes."""
    for name in list(sys.modules):
        if name.split(".")[0] == "tensorrt_llm" or name == "kvcustody.integrations.tensorrt_llm.connector":
            del sys.modules[name]
