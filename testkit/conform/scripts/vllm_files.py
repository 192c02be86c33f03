"""Do two revisions of one model, or two RoPE scalings, have two names in vLLM's file tier?

python vllm_files.py model-revision        # needs: vllm
"""

from __future__ import annotations

import inspect
import json
import sys
from typing import Any

MEANING = ("revision", "rope", "adapter", "lora", "weights")


def main(case: str) -> dict[str, Any]:
    """What was seen."""
    from vllm.v1.kv_offload.file_mapper import FileMapper

    assert case == "model-revision"
    given = inspect.signature(FileMapper).parameters
    told = [name for name in given if any(word in name for word in MEANING)]
    same = {
        "root_dir": "/x",
        "model_name": "m",
        "tokens_per_hash": 16,
        "blocks_per_file": 1,
        "rank": 0,
        "dtype": "half",
    }
    sizes = dict.fromkeys(("tp_size", "pp_size", "pcp_size", "dcp_size"), 1)
    base = FileMapper(**same, **sizes).base_path
    return {
        "found": not told,
        "evidence": f"`{base}` comes from {', '.join(given)}: none of them is a revision, a RoPE scaling or an adapter",
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
