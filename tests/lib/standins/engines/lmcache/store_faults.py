"""A module of LMCache's server for tests only: the stores behind our adapter do what they should not.

    faults = StoreFaults(folder)                     # in the test
    server = LMCacheServer(…, *GOVERNED, *faults.arguments())
    faults.set("nvme", "slow", 2.0)                  # `full`, `fails`, `lies`; "" no more
    faults.loads("nvme")                             # how many loads that tier's store has begun, and ended
    faults.scan()                                    # a full scan with repair, as one that a worker is asked for

Whatever the two sides tell each other stands in files of `folder`.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

_LOOK_SECONDS = 0.02
_SECONDS = 20.0


class StoreFaults:
    """The test's side."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._number = 0
        self._told: dict[str, Any] = {}

    def arguments(self) -> tuple[str, str]:
        """Of the server."""
        module = {"module_path": __name__, "config": {"folder": str(self._folder)}}
        return "--server-module", json.dumps(module)

    def set(self, tier: str, kind: str, seconds: float = 0.0) -> None:
        """From now on, until it is set otherwise."""
        self._told[tier] = (kind, seconds)
        self._tell(None)

    def scan(self) -> list[str]:
        """Classes of what was found and repaired."""
        found: list[str] = self._tell("scan")["found"]
        return found

    def loads(self, tier: str) -> tuple[int, int]:
        """Begun and ended, since the server's start."""
        counts = self._answer().get("counts", {})
        return counts.get(f"{tier} load", 0), counts.get(f"{tier} loaded", 0)

    def stores(self, tier: str) -> int:
        """Objects that the tier's store took since the server's start."""
        return int(self._answer().get("counts", {}).get(f"{tier} stored", 0))

    def first_tier(self) -> int:
        """Objects in LMCache's first tier."""
        return int(self._answer().get("first tier", 0))

    def _tell(self, what: str | None) -> dict[str, Any]:
        self._number += 1
        _write(self._folder / "told", {"number": self._number, "faults": self._told, "do": what})
        end = time.monotonic() + _SECONDS
        while time.monotonic() < end:
            answer = self._answer()
            if answer.get("number") == self._number:
                return answer
            time.sleep(_LOOK_SECONDS)
        raise AssertionError("the server's stores do not hear of it")

    def _answer(self) -> dict[str, Any]:
        return _read(self._folder / "answer")


try:
    from lmcache.v1.multiprocess.engine_module import DiscoverableModule
except ImportError:  # 0.5.6, or no LMCache
    DiscoverableModule = object


class FaultyStores(DiscoverableModule):  # type: ignore[misc]
    """The server's side: a thread that listens, and hooks in the stores."""

    module_name = "faulty_stores"

    @classmethod
    def create(cls, build: Any) -> FaultyStores | None:
        """What LMCache calls from 0.5.7 on."""
        return cls(build.engine_context, Path(build.config_for(cls)["folder"]))

    def __init__(self, context: Any, folder: Path) -> None:
        self.context = context
        self._folder = folder
        self._faults: dict[str, tuple[str, float]] = {}
        self._counts: Counter[str] = Counter()
        self._ends = threading.Event()
        [self._adapter] = [adapter for _, adapter in context.storage_manager.l2_adapters()]
        self._first = list(context.storage_manager._l1_managers_by_id.values())
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def report_status(self) -> dict[str, Any]:
        """Nothing for LMCache."""
        return {}

    def close(self) -> None:
        """No more."""
        self._ends.set()

    def _listen(self) -> None:
        is_hooked, answer = False, {"number": 0, "counts": {}}
        _write(self._folder / "answer", answer)
        while not self._ends.wait(_LOOK_SECONDS):
            custody = self._adapter.custody
            if not is_hooked and custody.is_open:
                custody.run(self._hook).result(_SECONDS)
                is_hooked = True
            order = _read(self._folder / "told")
            before, answer = answer, {"number": answer["number"], "counts": dict(self._counts)}
            answer["first tier"] = sum(len(one._objects) for one in self._first)
            if order.get("number", 0) > answer["number"]:
                self._faults = {tier: tuple(how) for tier, how in order["faults"].items()}
                answer["number"] = order["number"]
                if order["do"] == "scan":
                    scanned = custody.run(lambda chunks: chunks.worker.recover()).result(_SECONDS)
                    answer["found"] = [one.orphan for one in scanned.findings]
            if answer != before:
                _write(self._folder / "answer", answer)

    def _hook(self, chunks: Any) -> None:
        for tier in chunks.tiers:
            self._hook_store(tier, tier._index.store)

    def _hook_store(self, tier: Any, store: Any) -> None:
        from kvcustody.errors import StoreError

        loads, completes, takes = store.prepare_load, store.complete_load, store.prepare_store
        kind, instead = store.kind, dict[bytes, bytes]()

        def prepare_load(name: bytes) -> Any:
            how, seconds = self._faults.get(kind, ("", 0.0))
            self._counts[f"{kind} load"] += 1
            if how == "slow":
                time.sleep(seconds)
            try:
                if how == "fails":
                    raise StoreError("told to fail")
                if how == "lies":
                    names = sorted(copy.name for copy in tier.copies())
                    instead[name] = names[names.index(name) - 1]
                return loads(instead.get(name, name))
            finally:
                self._counts[f"{kind} loaded"] += 1

        def complete_load(name: bytes) -> None:
            completes(instead.pop(name, name))

        def prepare_store(name: bytes, size: int, until_us: int = 0) -> Any:
            how, seconds = self._faults.get(kind, ("", 0.0))
            if how == "slow":
                time.sleep(seconds)
            if how == "full":
                return None
            into = takes(name, size)
            self._counts[f"{kind} stored"] += into is not None
            return into

        store.prepare_load, store.complete_load, store.prepare_store = (
            prepare_load,
            complete_load,
            prepare_store,
        )


def build_server_modules(build: Any) -> FaultyStores:
    """What LMCache 0.5.6 calls."""
    return FaultyStores(build.server_context, Path(build.config["folder"]))


def _write(path: Path, what: dict[str, Any]) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(what))
    draft.replace(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return found
