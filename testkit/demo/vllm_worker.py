"""A worker extension for the demonstration only: it records what a vLLM step receives and leaves.

1. A block is read after everything that the step does before its forward pass, a governed scrub among it, and once
   more after it.
2. Requests are told apart by their prompts: the engine gives them ids of its own.
"""

from __future__ import annotations

import base64
from typing import Any

import torch

from kvcustody.integrations.vllm.worker.kv_layout import block_tensors


class WatchedWorker:
    """A mixin for vLLM's worker."""

    model_runner: Any

    def demo_watch(self) -> int:
        """Start recording; return the tokens per block."""
        runner = self.model_runner
        config = runner.kv_cache_config
        self._demo_seen: list[dict[str, Any]] = []
        self._demo_step: Any = None
        caches = {str(at): cache for at, cache in enumerate(runner.kv_caches)}
        self._demo_all = block_tensors(caches, config.num_blocks)
        self._demo_first = block_tensors({"0": caches["0"]}, config.num_blocks)
        self._demo_dtype = runner.kv_caches[0].dtype
        execute, forward = runner.execute_model, runner._model_forward

        def execute_model(scheduled: Any, *arguments: Any, **named: Any) -> Any:
            self._demo_step = scheduled
            return execute(scheduled, *arguments, **named)

        def model_forward(*arguments: Any, **named: Any) -> Any:
            fresh = self._demo_before()
            result = forward(*arguments, **named)
            for seen, block in fresh:
                seen["left"] = self._demo_layer(block)
            return result

        runner.execute_model, runner._model_forward = execute_model, model_forward
        return int(config.kv_cache_groups[0].kv_cache_spec.block_size)

    def demo_take(self) -> list[dict[str, Any]]:
        """Return what was recorded since the last call, one row per new request."""
        seen, self._demo_seen = self._demo_seen, []
        return seen

    def _demo_before(self) -> list[tuple[dict[str, Any], int]]:
        scheduled, self._demo_step = self._demo_step, None
        if scheduled is None:
            return []
        size = int(self.model_runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
        fresh = []
        for request in scheduled.scheduled_new_reqs:
            new = request.block_ids[0][request.num_computed_tokens // size :]
            row = torch.tensor(new[-1:])
            seen = {
                "prompt": list(request.prompt_token_ids),
                "computed": int(scheduled.num_scheduled_tokens[request.req_id]),
                "block": int(new[-1]),
                "nonzero": sum(int(torch.count_nonzero(table[row])) for table in self._demo_all),
                "found": self._demo_layer(new[-1]),
                "left": "",
            }
            self._demo_seen.append(seen)
            fresh.append((seen, new[-1]))
        return fresh

    def _demo_layer(self, block: int) -> str:
        """Return the first layer's values of a block, float32, as base64."""
        row = torch.cat([table[block].contiguous() for table in self._demo_first])
        values = row.view(self._demo_dtype).float().cpu().numpy()
        return base64.b64encode(values.tobytes()).decode()
