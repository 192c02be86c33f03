"""Does the name of LMCache's file say whose the object is?

python lmcache_files.py name-tells-tenant        # needs: lmcache
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any


def main(case: str) -> dict[str, Any]:
    """What was seen."""
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig

    assert case == "name-tells-tenant"
    with tempfile.TemporaryDirectory() as folder:
        adapter = FSL2Adapter(FSL2AdapterConfig(folder))
        try:
            name = adapter._key_to_path(ObjectKey(bytes(32), "model", 0, 0, "tenant-acme")).name
        finally:
            adapter.close()
    return {"found": "tenant-acme" in name, "evidence": f"salt `tenant-acme` is kept in `{name}`"}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
