"""The questions about HiCache's files, put to our storage, which SGLang's own factory makes.

python -m kvcustody.testkit.conform.scripts.ours.kvcustody_hicache CASE        # needs: sglang, kvcustody
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ONE, TWO = "11" * 32, "22" * 32
PAGE_BYTES = 4096
TERMS = {
    "backend_name": "custody",
    "module_path": "kvcustody.integrations.sglang.hicache_storage",
    "class_name": "CustodyStorage",
    "owner": "acme",
    "seconds": 600,
    "size_bytes": 1 << 24,
}


def opened(folder: Path, **given: Any) -> Any:
    """Return the storage as HiCache's controller opens it; `given`: settings, or fields of SGLang's configuration."""
    import torch
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    fields = {field.name: field for field in dataclasses.fields(HiCacheStorageConfig)}
    values: dict[str, Any] = {name: 0 for name, field in fields.items() if field.default is dataclasses.MISSING}
    values |= {"tp_size": 1, "pp_size": 1, "attn_cp_size": 1, "model_name": "org/m", "is_mla_model": False}
    values |= {name: given.pop(name) for name in list(given) if name in fields}
    values["extra_config"] = TERMS | {"path": str(folder / "tier")} | given
    storage = StorageBackendFactory.create_backend("dynamic", HiCacheStorageConfig(**values), None)
    storage.register_mem_pool_host(
        SimpleNamespace(
            page_size=16,
            layout="layer_first",
            start_layer=0,
            layer_num=1,
            get_dummy_flat_data_page=lambda: torch.zeros(PAGE_BYTES, dtype=torch.uint8),
        )
    )
    return storage


def drawn() -> Any:
    """Return a page with random bytes."""
    import torch

    return torch.frombuffer(bytearray(os.urandom(PAGE_BYTES)), dtype=torch.uint8)


def come(storage: Any, key: str) -> bytes | None:
    """Return the page, if the storage has it."""
    import torch

    page = storage.get(key, torch.zeros(PAGE_BYTES, dtype=torch.uint8))
    return None if page is None else page.numpy().tobytes()


def files(folder: Path) -> list[Path]:
    """Return the objects on the disk."""
    found = (path for path in (folder / "tier").rglob("*") if path.is_file() and len(path.name) == 64)
    return sorted(found)


def main(case: str) -> dict[str, Any]:
    """Return what was seen."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for name, file in (("ROOT_KEY", "root.key"), ("KEYRING", "keys.json"), ("SHRED_KEYS", "shred.keys")):
            os.environ[f"KVCUSTODY_{name}_PATH"] = str(folder / file)
        storage = opened(folder)
        first = drawn()
        assert storage.set(ONE, first) and come(storage, ONE) == first.numpy().tobytes(), "own pages come back"
        found, evidence = _look(case, folder, storage, first.numpy().tobytes())
    return {"found": found, "evidence": evidence}


def _look(case: str, folder: Path, storage: Any, content: bytes) -> tuple[bool, str]:
    if case in ("other-model", "model-revision"):
        storage.close()
        other = {"model_name": "org/n"} if case == "other-model" else {"revision": "2"}
        storage = opened(folder, **other)
        seen = come(storage, ONE)
        storage.close()
        return seen is not None, f"{int(seen is not None)} of 1 look-ups under {other} found it"
    if case == "renamed-object":
        assert storage.set(TWO, drawn())
        one, two = files(folder)
        data, more = one.read_bytes(), two.read_bytes()
        one.write_bytes(more)
        two.write_bytes(data)
        pages = [come(storage, key) for key in (ONE, TWO)]
        storage.close()
        return any(pages), f"{sum(page is not None for page in pages)} of 2 files that changed places were served"
    if case == "older-object":
        [place] = files(folder)
        old = place.read_bytes()
        storage.clear()
        later = drawn()
        assert storage.set(ONE, later) and come(storage, ONE) == later.numpy().tobytes()
        place.write_bytes(old)
        seen = come(storage, ONE)
        storage.close()
        return seen is not None, "the earlier page was served" if seen else "a miss, and the copy ended"
    if case == "clear-at-rest":
        [place] = files(folder)
        kept, mode = place.read_bytes(), place.stat().st_mode & 0o777
        storage.close()
        clear = sum(content[at : at + 16] in kept for at in range(0, PAGE_BYTES, 16))
        return (
            clear > 0 or mode & 0o077 > 0,
            f"{clear} of {PAGE_BYTES // 16} pieces are in the file; mode {mode:04o}",
        )
    assert case == "name-tells-tenant"
    names = " ".join(str(path.relative_to(folder)) for path in files(folder))
    storage.close()
    return (
        "acme" in names or ONE in names,
        "64 hexadecimal digits that nobody makes without the owner's secret",
    )


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
