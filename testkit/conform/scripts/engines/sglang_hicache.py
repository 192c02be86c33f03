"""Whose pages, and of which weights, are the files of SGLang's HiCache?

python sglang_hicache.py salt-dropped        # needs: sglang
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TOKENS = list(range(64))
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


def main(case: str) -> dict[str, Any]:
    """What was seen."""
    if case == "model-revision":
        with tempfile.TemporaryDirectory() as folder:
            return _revisions(Path(folder))
    from sglang.srt.mem_cache.utils import get_hash_str, storage_namespace_seed

    if case == "salt-dropped":
        names = [get_hash_str(TOKENS, storage_namespace_seed(None, salt)) for salt in (None, "acme", "beta")]
        return {
            "found": len(set(names)) < len(names),
            "evidence": f"{len(set(names))} names of one page for nobody, `acme` and `beta`",
        }
    assert case == "namespace-alias"
    parts = (None, "", "a", "b", "ab", "a\0b", "\1a")
    seeds = [storage_namespace_seed(*pair) for pair in product(parts, parts)]
    return {
        "found": len(set(seeds)) < len(seeds),
        "evidence": f"{len(set(seeds))} seeds of {len(seeds)} pairs of extra key and salt",
    }


def storage(folder: Path, **given: Any) -> Any:
    """The file storage of an engine with these arguments, by the configuration that SGLang's controller makes."""
    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.server_args import ServerArgs

    alone = dict.fromkeys(("tp_rank", "pp_rank", "attn_dcp_rank"), 0)
    alone |= dict.fromkeys(("tp_size", "pp_size", "attn_dcp_size"), 1)
    pool = SimpleNamespace(layout="layer_first", storage_format_tag=None)
    controller = SimpleNamespace(
        mem_pool_device=None, mem_pool_host=pool, storage_host_pool=pool, attn_cp_group=None,
        get_attn_cp_rank_and_size=lambda: (0, 1), enable_storage_metrics=False, page_size=16,
    )  # fmt: skip
    arguments = ServerArgs(**{"model_path": str(folder / "model"), "device": "cpu"} | given)
    with get_parallel().override(**alone):
        name = arguments.served_model_name or arguments.model_path
        config = HiCacheController._generate_storage_config(controller, name)
    return HiCacheFile(config, str(folder / "store"))


def _revisions(folder: Path) -> dict[str, Any]:
    import torch

    for name in ("model", "other"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(LLAMA))
    page = torch.frombuffer(bytearray(os.urandom(4096)), dtype=torch.uint8)
    assert storage(folder, revision="one").set("11" * 32, page)

    def come(**given: Any) -> bool:
        found = storage(folder, **given).get("11" * 32, torch.zeros(4096, dtype=torch.uint8))
        return found is not None and bool((found == page).all())

    assert come(revision="one") and not come(model_path=str(folder / "other")), (
        "a model of another name has its own"
    )
    served = come(revision="two")
    return {
        "found": served,
        "evidence": f"{int(served)} of 1 look-ups with another revision was served the page",
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
