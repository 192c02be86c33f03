"""Whose pages, and of which weights, are HiCache's names of files in SGLang?

python sglang_hicache.py salt-dropped        # needs: sglang
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from itertools import product
from typing import Any

TOKENS = list(range(64))
MEANING = ("revision", "rope", "lora", "adapter", "weight")


def main(case: str) -> dict[str, Any]:
    """What was seen."""
    if case == "model-revision":
        return _revisions()
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


def _revisions() -> dict[str, Any]:
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

    given = [field.name for field in dataclasses.fields(HiCacheStorageConfig)]
    told = [name for name in given if any(word in name for word in MEANING)]
    values: dict[str, Any] = {
        field.name: field.default
        for field in dataclasses.fields(HiCacheStorageConfig)
        if field.default is not dataclasses.MISSING
    }
    values |= {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "is_mla_model": False,
        "model_name": "org/m",
    }
    for name in given:
        values.setdefault(name, None if "config" in name else 0)
    with tempfile.TemporaryDirectory() as folder:
        suffix = HiCacheFile(HiCacheStorageConfig(**values), folder).config_suffix
    return {
        "found": not told,
        "evidence": f"files end in `{suffix}`, from {', '.join(given)}: none of them is a revision, a RoPE scaling or "
        "an adapter",
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
