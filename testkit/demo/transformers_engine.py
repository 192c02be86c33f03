"""transformers' continuous batching in this process, plain or governed, stepped by the same code.

1. Plain and governed engines differ by who made the manager, and by nothing else.
2. The engine does not report cached tokens to a client; they are read from its own record of the request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import offloading_manager

from kvcustody.errors import ConfigError
from kvcustody.governance.identity.model_identity import ModelIdentity
from kvcustody.governance.identity.principal import identify
from kvcustody.integrations.transformers.batching.governed_batching import GovernedBatching
from kvcustody.testkit.demo.attacks import AttackOutcome, read_blocks
from kvcustody.testkit.demo.codebook import Codebook
from kvcustody.testkit.demo.deployment import Deployment
from kvcustody.testkit.demo.engine import ATTACKER, VICTIM, Served, Values
from kvcustody.testkit.demo.model import HEAD_DIM, HEADS, LAYERS, SEED, make_model
from kvcustody.testkit.demo.vocabulary import note, token_ids
from kvcustody.testkit.tiny_model import tiny_model

PAGE_TOKENS = 16
BLOCKS = 192
SMALL_POOL_BLOCKS = 8
NEW_TOKENS = 2  # the engine publishes nothing of a request that ends with its first token
STEPS_MAX = 2_000
_HOST_GIB = 0.001
_NOTHING = np.empty(0, np.float32)


class TransformersDemoEngine:
    """One engine. With a `deployment` it is governed; raises `ConfigError` where that is impossible."""

    block_tokens = PAGE_TOKENS

    def __init__(self, deployment: Deployment | None = None, *, blocks: int = BLOCKS, host_gib: float = 0.0) -> None:
        self._model = make_model()
        chosen: Any = GenerationConfig
        generation = chosen(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1)
        config = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=blocks,
            max_batch_tokens=512,
            max_memory_percent=0.9,
            cpu_offload_space=host_gib,
        )
        self._governed: GovernedBatching | None = None
        if deployment is not None:
            settings = deployment.settings(PAGE_TOKENS)
            self._governed = GovernedBatching(
                self._model, settings, _identity(), generation_config=generation, batching_config=config
            )
            self.manager: Any = self._governed.manager
        else:
            self.manager = self._model.init_continuous_batching(generation, config)
            with _unpinned():
                self.manager.batch_processor = self.manager._create_batch_processor()
        self.processor = self.manager.batch_processor
        (self._allocator,) = self.processor.cache.cache_allocators.values()

    def serve(self, tenant: str, prompts: Sequence[Sequence[int]], salt: str | None = None) -> list[Served]:
        """Serve as `Engine` says. This engine has no salt, so `salt` has no effect."""
        ids = [self.submit(tenant, prompt) for prompt in prompts]
        seen: dict[str, Served] = {}
        self.run(ids, seen)
        return [seen[one] for one in ids]

    def submit(self, tenant: str, prompt: Sequence[int], max_new_tokens: int = NEW_TOKENS) -> str:
        """Queue a prompt for a tenant; the plain engine ignores the tenant."""
        if self._governed is None:
            return str(self.manager.add_request(list(prompt), max_new_tokens=max_new_tokens))
        principal = identify(issuer="api-keys", tenant=tenant)
        return self._governed.submit(principal, list(prompt), max_new_tokens=max_new_tokens)

    def run(self, ids: Sequence[str], seen: dict[str, Served] | None = None) -> None:
        """Step until every one of `ids` has finished; `seen` receives what happened to each."""
        waiting = set(ids)
        processor = self.processor
        for _ in range(STEPS_MAX):
            if not waiting:
                return
            if processor.prepare_next_batch():
                batch = processor.inputs_and_outputs.requests_in_batch
                fresh = [] if seen is None else self._before(batch, seen)
                processor._generation_step(self.manager.model)
                for one, block in fresh:
                    assert seen is not None
                    seen[one] = seen[one]._replace(left=self._layer(self._row(block)))
                processor.update_batch()
            waiting -= self._finished()
        raise TimeoutError(f"{STEPS_MAX} steps and `{len(waiting)}` requests are not finished")

    def close(self) -> None:
        """End custody, or drop the cache."""
        if self._governed is not None:
            self._governed.close()
        self.manager.batch_processor = None

    def host_blocks(self) -> list[Values]:
        """Return the first layer of every block in the engine's host memory tier."""
        views = self.processor.offloading_manager._cpu_views
        (view,) = views.values()
        return [self._layer(row) for row in view]

    # -- eyes -------------------------------------------------------------------------------------------------------

    def _before(self, batch: Sequence[Any], seen: dict[str, Served]) -> list[tuple[str, int]]:
        """Note what this batch is about to do; return the last new block of each request in its first step."""
        fresh = []
        for future in batch:
            state = future.state
            request_id, computed = state.request_id, future.query_length
            if request_id in seen:
                prompt = len(state.initial_tokens) - seen[request_id].cached_tokens
                more = min(
                    prompt, seen[request_id].computed_tokens + computed
                )  # what it generates is no cost of its prompt
                seen[request_id] = seen[request_id]._replace(computed_tokens=more)
                continue
            cached = state.position_offset - computed  # the batch has moved the position already
            new = self._allocator.block_table[request_id][cached // PAGE_TOKENS :]
            if not new:
                seen[request_id] = Served(cached, computed, -1, 0, _NOTHING, _NOTHING)
                continue
            nonzero = int(torch.count_nonzero(self._row(new[-1])))
            seen[request_id] = Served(cached, computed, new[-1], nonzero, self._layer(self._row(new[-1])), _NOTHING)
            fresh.append((request_id, new[-1]))
        return fresh

    def _row(self, block: int) -> torch.Tensor:
        rows: torch.Tensor = self.processor.cache.cache_tensor.view(-1, self._allocator.bytes_per_block)
        return rows[block]

    def _layer(self, row: torch.Tensor) -> Values:
        """Return a block's content: its layers in order, each with keys before values."""
        values: Values = row.view(self._allocator.cache_dtype).float().numpy().copy()
        return values[: len(values) // LAYERS]

    def _finished(self) -> set[str]:
        queue = self.manager.output_router.output_queue
        finished = set()
        while not queue.empty():
            result = queue.get()
            if result.is_finished():
                if result.error is not None:
                    raise ConfigError(f"a request of the demonstration failed: {result.error}")
                finished.add(result.request_id)
        return finished


def host_tier(secret: tuple[str, ...], book: Codebook) -> AttackOutcome:
    """Move the victim's blocks to host memory and back in a crowded engine; return what remains there at the end."""
    engine = TransformersDemoEngine(blocks=SMALL_POOL_BLOCKS, host_gib=_HOST_GIB)
    try:
        # The neighbour leaves one block, and keeps within its own while the victim's message outgrows that one.
        crowd = ["hello"] * ((SMALL_POOL_BLOCKS - 1) * PAGE_TOKENS - PAGE_TOKENS // 2)
        engine.run(
            [
                engine.submit(ATTACKER, token_ids(crowd), PAGE_TOKENS),
                engine.submit(VICTIM, token_ids(note(secret)), PAGE_TOKENS),
            ]
        )
        return read_blocks(engine.host_blocks(), secret, book)
    finally:
        engine.close()


def host_tier_governed(deployment: Deployment) -> AttackOutcome:
    """Start the same engine under governance, which refuses to start."""
    try:
        engine = TransformersDemoEngine(deployment, blocks=SMALL_POOL_BLOCKS, host_gib=_HOST_GIB)
    except ConfigError as error:
        return AttackOutcome(refused=error.message)
    engine.close()
    return AttackOutcome(text="the engine started with a tier that nobody governs")


class _PageableTorch:
    """torch without page-locked memory, which needs an accelerator and only speeds up copies."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*sizes: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        """Return `torch.empty` without pinning."""
        return torch.empty(*sizes, **options)


@contextmanager
def _unpinned() -> Iterator[None]:
    """Let the engine's host tier exist without an accelerator."""
    if torch.cuda.is_available():
        yield
        return
    module: Any = offloading_manager
    before, module.torch = module.torch, _PageableTorch()
    try:
        yield
    finally:
        module.torch = before


def _identity() -> ModelIdentity:
    return tiny_model(
        weights_digest=f"seed:{SEED}",
        tokenizer_digest="words",
        chat_template="none",
        kv_dtype="float32",
        kv_layout="paged",
        block_tokens=PAGE_TOKENS,
        attention={"layers": LAYERS, "heads": HEADS, "head_dim": HEAD_DIM},
    )
