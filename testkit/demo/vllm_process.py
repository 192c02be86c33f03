"""The process with the demonstration's vLLM engine: requests on stdin, answers on a descriptor.

1. One JSON document a line, both ways. The end of stdin is the end of the engine and of its processes.
2. stdout and stderr are a log: vLLM and its children write there what they like.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from kvcustody.testkit.demo.model import save_model

BATCH_TOKENS = 4096
_ENGINE = {
    "enforce_eager": True,
    "dtype": "bfloat16",
    "max_model_len": 512,
    "block_size": 32,
    "num_gpu_blocks_override": 512,
    "max_num_seqs": 32,
    "max_num_batched_tokens": BATCH_TOKENS,
    "skip_tokenizer_init": True,
    "seed": 0,
    "gpu_memory_utilization": 0.3,
    "worker_extension_cls": "kvcustody.testkit.demo.vllm_worker.WatchedWorker",
}


def main(folder: Path, transfer: dict[str, Any] | None, answers: Any) -> None:
    """Start the engine, serve until stdin ends, stop it."""
    save_model(folder / "model")
    from vllm import LLM
    from vllm.config import KVTransferConfig

    options = dict(_ENGINE)
    if transfer is not None:
        options["kv_transfer_config"] = KVTransferConfig(**transfer)
    llm = LLM(str(folder / "model"), **options)
    try:
        _write(answers, {"block_tokens": llm.collective_rpc("demo_watch")[0]})
        for line in sys.stdin:
            _write(answers, _serve(llm, json.loads(line)))
    finally:
        llm.llm_engine.engine_core.shutdown()


def _serve(llm: Any, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run the bodies together; return what the engine reports about each and what its worker saw."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    for number, body in enumerate(bodies):
        prompt = {"prompt_token_ids": body["prompt"]}
        if "cache_salt" in body:
            prompt["cache_salt"] = body["cache_salt"]
        transfer = body.get("kv_transfer_params")
        extra = None if transfer is None else {"kv_transfer_params": transfer}
        sampling = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False, extra_args=extra)
        engine.add_request(str(number), prompt, sampling)
    cached: dict[int, int] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                cached[int(output.request_id)] = output.num_cached_tokens or 0
    seen = {tuple(row.pop("prompt")): row for row in llm.collective_rpc("demo_take")[0]}
    return [{"cached": cached[at], **seen[tuple(body["prompt"])]} for at, body in enumerate(bodies)]


def _write(answers: Any, document: Any) -> None:
    answers.write(json.dumps(document) + "\n")
    answers.flush()


if __name__ == "__main__":
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    with os.fdopen(descriptor, "w") as answers:
        main(Path(sys.argv[2]), json.loads(sys.argv[3]), answers)
