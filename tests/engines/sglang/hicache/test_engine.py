"""A plain SGLang with HiCache: what its storage keeps is sealed with ours, found by its owner alone, and ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from standins.engines.sglang.sglang_engine import SglangEngine
from standins.waiting import until

PAGE = 16
PROMPT = [16 + at * 7 % 400 for at in range(200)]
WHOLE = len(PROMPT) // PAGE * PAGE
HICACHE: dict[str, Any] = {
    "page_size": PAGE,
    "enable_hierarchical_cache": True,
    "hicache_ratio": 2.0,
    "hicache_write_policy": "write_through",
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "layer_first",
    "hicache_storage_prefetch_policy": "wait_complete",
}
CUSTODY = {
    "backend_name": "custody",
    "module_path": "kvcustody.integrations.sglang.hicache_storage",
    "class_name": "CustodyStorage",
    "owner": "acme",
    "seconds": 600,
    "size_bytes": 1 << 24,
    "prefetch_threshold": PAGE,
}
Start = Callable[..., SglangEngine]


@pytest.fixture
def start(
    model: Path,
    site: list[str],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Start]:
    """Starts engines, one after the other, over the same keys and folders: what a device and a host kept is gone."""
    import json

    from standins.engines.vllm.engine_site import add_distribution

    folder = tmp_path_factory.mktemp("copies")
    add_distribution(
        folder,
        "hicache-copies",
        "0",
        "[sglang.srt.plugins]\ncopies = standins.engines.sglang.hicache_copies:register\n",
    )
    monkeypatch.syspath_prepend(str(folder))
    keys = {"ROOT_KEY": "root.key", "KEYRING": "keyring.json", "SHRED_KEYS": "shred.keys"}
    settings = {f"KVCUSTODY_{name}_PATH": str(tmp_path / file) for name, file in keys.items()}
    settings["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(tmp_path / "plain")
    running: list[SglangEngine] = []

    def one(backend: str = "dynamic", **terms: Any) -> SglangEngine:
        while running:
            running.pop().close()
        extra = {"prefetch_threshold": PAGE} if backend == "file" else CUSTODY | terms
        running.append(
            SglangEngine(
                model,
                [str(folder), *site],
                settings=settings,
                hicache_storage_backend=backend,
                hicache_storage_backend_extra_config=json.dumps(extra),
                **HICACHE,
            )
        )
        return running[-1]

    yield one
    for engine in running:
        engine.close()


def pages(folder: Path) -> list[bytes]:
    """What rests there, file by file."""
    return [path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.stat().st_size]


def test_pages_rest_sealed_and_come_back_to_their_owner_alone(start: Start, tmp_path: Path) -> None:
    count, folder = WHOLE // PAGE, tmp_path / "tier"
    plain = start("file")
    first = plain.run(PROMPT)
    until(lambda: len(pages(tmp_path / "plain")) >= count)
    assert start("file").run(PROMPT) == first._replace(cached_tokens=WHOLE), "positive control: storage is read"
    clear = pages(tmp_path / "plain")

    ours = start(path=str(folder))
    assert ours.run(PROMPT) == first
    until(lambda: len(list(folder.rglob("*"))) > count)
    assert start(path=str(folder)).run(PROMPT) == first._replace(cached_tokens=WHOLE)
    sealed = b"".join(pages(folder))
    assert len(sealed) > sum(map(len, clear[:count]))
    pieces = [page[at : at + 32] for page in clear for at in range(0, len(page), 512)]
    assert all(any(piece in page for page in clear) for piece in pieces[:8]), "positive control"
    assert not any(piece in sealed for piece in pieces)

    assert start(path=str(folder), revision="another").run(PROMPT) == first, "weights of another revision"
    assert start(path=str(tmp_path / "tier"), owner="beta").run(PROMPT) == first


def test_what_was_changed_is_a_miss(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    first = start(path=str(folder)).run(PROMPT)
    count = WHOLE // PAGE
    until(lambda: len(objects(folder)) >= count)
    time.sleep(1)
    start(path=str(tmp_path / "other"))  # the engine before it has ended
    for path in objects(folder):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    assert start(path=str(folder)).run(PROMPT) == first


def objects(folder: Path) -> list[Path]:
    """Files that hold a page."""
    return [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 4096]


def test_pages_end_at_their_deadline_and_when_storage_is_cleared(start: Start, tmp_path: Path) -> None:
    brief, folder = tmp_path / "brief", tmp_path / "tier"
    first = start(path=str(brief), seconds=6).run(PROMPT)
    until(lambda: bool(objects(brief)))
    until(lambda: not objects(brief))  # nobody asks
    assert start(path=str(brief), seconds=6).run(PROMPT) == first

    engine = start(path=str(folder))
    engine.run(PROMPT)
    until(lambda: len(objects(folder)) >= WHOLE // PAGE)
    manager = engine.engine.tokenizer_manager
    engine.engine.loop.run_until_complete(manager.clear_hicache_storage())
    until(lambda: not objects(folder))
    assert start(path=str(folder)).run(PROMPT) == first
