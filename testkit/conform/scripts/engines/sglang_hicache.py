"""Whose pages, computed with which weights, are the files of SGLang's HiCache?

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
    """Return what was seen."""
    if case in APART:
        with tempfile.TemporaryDirectory() as folder:
            return APART[case](Path(folder))
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
    """Return the file storage of an engine with these arguments, with the configuration that SGLang's controller
    makes.
    """
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


def _page() -> Any:
    import torch

    return torch.frombuffer(bytearray(os.urandom(4096)), dtype=torch.uint8)


def _come(store: Any, key: str, page: Any) -> bool:
    import torch

    found = store.get(key, torch.zeros(4096, dtype=torch.uint8))
    return found is not None and bool((found == page).all())


def _two_tenants(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return a storage with one page per tenant, under SGLang's names for one prompt and their salts."""
    from sglang.srt.mem_cache.utils import get_hash_str, storage_namespace_seed

    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(LLAMA))
    store = storage(folder)
    keys = [get_hash_str(TOKENS, storage_namespace_seed(None, salt)) for salt in ("acme", "beta")]
    pages = {key: _page() for key in keys}
    assert all(store.set(key, page) and _come(store, key, page) for key, page in pages.items())
    return store, pages


def _ends(folder: Path) -> dict[str, Any]:
    store, pages = _two_tenants(folder)
    mine, others = pages
    if by_key := getattr(store, "delete", None):
        by_key(mine)
    else:
        store.clear()
    left = [_come(store, key, pages[key]) for key in (mine, others)]
    assert not left[0], "it is ended"
    way = "`delete`" if by_key else "`clear`, for want of a `delete`,"
    return {
        "found": not left[1],
        "evidence": f"{way} ended the tenant's page, and {int(not left[1])} of 1 of another's",
    }


def _clear(folder: Path) -> dict[str, Any]:
    _, pages = _two_tenants(folder)
    contents = {page.numpy().tobytes() for page in pages.values()}
    files = [path for path in (folder / "store").rglob("*") if path.is_file()]
    clear, mode = sum(path.read_bytes() in contents for path in files), files[0].stat().st_mode & 0o777
    found = clear > 0 or mode & 0o077 > 0
    return {
        "found": found,
        "evidence": f"{clear} of {len(files)} files hold the page as it was; mode {mode:04o}",
    }


def _revisions(folder: Path) -> dict[str, Any]:
    for name in ("model", "other"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(LLAMA))
    key, page = "11" * 32, _page()
    assert storage(folder, revision="one").set(key, page)
    assert _come(storage(folder, revision="one"), key, page), "own pages come back"
    other = storage(folder, model_path=str(folder / "other"))
    assert not _come(other, key, page), "a model of another name has its own"
    served = _come(storage(folder, revision="two"), key, page)
    return {
        "found": served,
        "evidence": f"{int(served)} of 1 look-ups with another revision was served the page",
    }


APART = {"model-revision": _revisions, "erase-tenant": _ends, "clear-at-rest": _clear}

if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
