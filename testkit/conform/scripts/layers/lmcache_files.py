"""What do LMCache's files reveal about their owner, who can read them, and can a tenant's files be ended?

python lmcache_files.py name-tells-tenant | clear-at-rest | erase-tenant        # needs: lmcache
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SALTS = ("tenant-acme", "tenant-beta")


def stored(adapter: Any, key: Any, content: bytes) -> None:
    """Store an object.

    Raises:
        RuntimeError: the adapter does not keep it.
    """
    import torch
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

    raw = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    about = MemoryObjMetadata(raw.shape, torch.uint8, 0, raw.numel(), 1, fmt=MemoryFormat.BINARY)
    task = adapter.submit_store_task([key], [TensorMemoryObj(raw, about, parent_allocator=None)])
    until = time.monotonic() + 20
    while time.monotonic() < until:
        time.sleep(0.01)
        done = adapter.pop_completed_store_tasks()
        if task in done:
            assert done[task].bytes_transferred() == len(content)
            return
    raise RuntimeError("nothing was stored")


def end_all_of(adapter: Any, salt: str) -> str:
    """End what an operator with a tenant's salt can name; return what prevents it."""
    try:
        page = adapter.list_l2_keys("model", 1000, None)
    except NotImplementedError:
        return "it cannot list its keys, and `delete` wants each of them"
    adapter.delete([key for key in page.keys if key.cache_salt == salt])
    return ""


def main(case: str) -> dict[str, Any]:
    """Return what was seen."""
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig

    content = os.urandom(4096)
    with tempfile.TemporaryDirectory() as folder:
        adapter = FSL2Adapter(FSL2AdapterConfig(folder))
        try:
            for salt in SALTS:
                stored(adapter, ObjectKey(bytes(32), "model", 0, 0, salt), content)
            why = end_all_of(adapter, SALTS[0]) if case == "erase-tenant" else ""
        finally:
            adapter.close()
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        clear = sum(path.read_bytes() == content for path in files)
        mode = files[0].stat().st_mode & 0o777
    mine = [path.name for path in files if SALTS[0] in path.name]
    if case == "clear-at-rest":
        evidence = f"{clear} of {len(files)} files hold the object as it was; mode {mode:04o}"
        return {"found": clear > 0 or mode & 0o077 > 0, "evidence": evidence}
    if case == "erase-tenant":
        return {
            "found": bool(mine),
            "evidence": f"{len(mine)} of 1 objects of the tenant are left: {why or 'it did not end'}",
        }
    assert case == "name-tells-tenant"
    return {
        "found": bool(mine),
        "evidence": f"salt `{SALTS[0]}` is kept in `{mine[0] if mine else files[0].name}`",
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])), flush=True)
