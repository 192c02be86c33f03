"""HiCache's storage (L3) for an ungoverned SGLang: its pages are stored sealed.

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
      '{"backend_name": "custody", "module_path": "kvcustody.integrations.sglang.hicache_storage",
        "class_name": "CustodyStorage", "owner": "acme", "seconds": 1800, "size_bytes": 200000000000,
        "path": "/var/lib/kvcustody/hicache", "revision": "main"}'

1. A page is a copy of `OwnedCopies`, by the name that SGLang's hash and namespace give it. It is also bound to the
   model's weights, which SGLang's own names leave out. A page that was changed, moved, is older or belongs to another
   is a miss, and so is every failure.
2. It is due after `seconds`, whether or not it is requested. HiCache has no way to delete one page; `clear` ends all of
   the owner's, their key before their bytes.
3. All of an engine's requests belong to one owner. Only SGLang's salt decides who may reuse what, and its pages on the
   device and in host memory are unencrypted. To isolate tenants, use a governed engine (`--radix-cache-backend
   kvcustody`).
4. With more than one rank, or with pools besides that of keys and values, the engine does not start.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolName

from kvcustody.errors import ConfigError
from kvcustody.governance.identity.content_digest import weights_fingerprint
from kvcustody.governance.tiers.owned_copies import Memory, OwnedCopies, OwnedTerms, digest_of
from kvcustody.guarding_thread import GuardingThread
from kvcustody.logger import get_logger

_LOOK_SECONDS = 0.5  # between looks at what is due
_RANKS = ("tp_size", "pp_size", "attn_cp_size", "dcp_size")
Answer = TypeVar("Answer")
_log = get_logger(__name__)


class CustodyStorage(HiCacheStorage):  # type: ignore[misc]
    """One owner's pages: in host memory, in files (`path`), in a shared store (`url`). Called on HiCache's threads."""

    def __init__(self, storage_config: Any, _named: Any = None) -> None:
        """Open the storage with the keys of the environment's settings.

        Raises:
            ConfigError: an option is refused.
        """
        given = storage_config.extra_config or {}
        several = {name: size for name in _RANKS if (size := getattr(storage_config, name, 1)) != 1}
        if several:
            raise ConfigError(f"hicache storage: {several}: pages of one rank alone are kept")
        self._terms = _terms(given)
        if not storage_config.model_name:
            raise ConfigError("hicache storage: sglang names no model, so its pages cannot be attributed")
        self._model = weights_fingerprint(str(storage_config.model_name), str(given.get("revision", "")))
        self._lock = threading.Lock()
        self._copies: OwnedCopies | None = None
        self._page_bytes = 0
        self._ends = threading.Event()
        self._thread = GuardingThread(self._end_what_is_due, name="kvcustody-hicache")

    # -- pools ----------------------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the pool whose pages are stored; it determines the page size."""
        super().register_mem_pool_host(mem_pool_host)
        page = mem_pool_host.get_dummy_flat_data_page()
        self._page_bytes = page.numel() * page.element_size()
        layout = digest_of(
            self._model, type(mem_pool_host).__name__, str(mem_pool_host.layout), str(page.dtype), str(page.shape),
            str(mem_pool_host.page_size), str(mem_pool_host.start_layer), str(mem_pool_host.layer_num),
        )  # fmt: skip
        with self._lock:
            if self._copies is None:
                tokens = int(mem_pool_host.page_size)
                self._copies = OwnedCopies(self._terms, layout, digest_of(self._model), self._page_bytes, tokens)
                self._thread.start()

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Refuse a pool besides that of keys and values.

        Raises:
            ConfigError: it is another pool (rule 4).
        """
        if host_pool_name != PoolName.KV:
            raise ConfigError(f"hicache storage: pool `{host_pool_name}` is not kept; pages of `kv` alone are")
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    # -- pages ----------------------------------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        """Return whether this page would open, as far as is known."""
        return self._do(lambda copies: _has(copies, key), False)

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return how many of these are here, from the first on."""

        def count(copies: OwnedCopies) -> int:
            for at, key in enumerate(keys):
                if not _has(copies, key):
                    return at
            return len(keys)

        return self._do(count, 0)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Return the page, in `target_location`; None where it is not here."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Sequence[Any] | None = None, target_sizes: Any = None
    ) -> list[Any]:
        """Return each page in its place; None for one that is not here."""
        places = list(target_locations) if target_locations is not None else [None] * len(keys)

        def load(key: str, place: Any, copies: OwnedCopies) -> Any:
            memory = self._memory(place)
            return place if memory is not None and copies.load(key.encode(), memory) else None

        return [self._do(partial(load, key, place), None) for key, place in zip(keys, places, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Seal this page; return whether it is here now."""
        memory = self._memory(value)
        return memory is not None and self._do(lambda copies: copies.store(key.encode(), memory), False)

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[Any] | None = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Seal these pages; return whether all are here now."""
        return values is not None and all(list(map(self.set, keys, values)))

    def clear(self) -> None:
        """End every page of the owner."""
        ended = self._do(lambda copies: copies.end_all(), -1)
        _log.info("pages ended", storage="hicache", pages=ended)
        if ended < 0:
            raise RuntimeError("the pages in storage could not be destroyed")

    def close(self) -> None:
        """Close the store; the next engine finds and ends what is in files."""
        self._ends.set()
        with self._lock:
            copies, self._copies = self._copies, None
            if copies is not None:
                copies.close()
        if self._thread.is_alive():
            self._thread.join()

    # -- the rest -------------------------------------------------------------------------------------------------

    def _do(self, call: Callable[[OwnedCopies], Answer], otherwise: Answer) -> Answer:
        """Run one call at a time; a failure is a miss, and the engine continues."""
        with self._lock:
            copies = self._copies
            if copies is None:
                return otherwise
            try:
                copies.refresh()
                return call(copies)
            except Exception as error:
                _log.error("page failed", storage="hicache", error=repr(error))
                return otherwise
            finally:
                copies.note()

    def _memory(self, page: Any) -> Memory | None:
        """Return a page's bytes in place; None for a foreign page."""
        if not isinstance(page, torch.Tensor) or page.device.type != "cpu" or not page.is_contiguous():
            return None
        memory: Memory = page.view(torch.uint8).numpy()
        return memory if memory.ndim == 1 and memory.size == self._page_bytes else None

    def _end_what_is_due(self) -> None:
        while not self._ends.wait(_LOOK_SECONDS):
            self._do(lambda copies: copies.expire() if copies.is_due() else None, None)


def _has(copies: OwnedCopies, key: str) -> bool:
    return copies.finds(key.encode()) or (copies.is_shared and copies.seek(key.encode()))


def _terms(given: dict[str, Any]) -> OwnedTerms:
    """Return the settings in SGLang's extra configuration.

    Raises:
        ConfigError: names what is missing or wrong.
    """
    owner, seconds, size = given.get("owner"), given.get("seconds"), given.get("size_bytes")
    path, url = given.get("path"), given.get("url")
    if type(owner) is not str or not owner:
        raise ConfigError(f"hicache storage: `owner` is `{owner}`; name the pages' owner")
    if not isinstance(seconds, int | float) or seconds <= 0:
        raise ConfigError(f"hicache storage: `seconds` is `{seconds}`; pages need a lifetime")
    if type(size) is not int or size <= 0:
        raise ConfigError(f"hicache storage: `size_bytes` is `{size}`; set the storage's capacity")
    if path is not None and (type(path) is not str or not path):
        raise ConfigError(f"hicache storage: `path` is `{path}`; name a folder, or leave it out")
    if url is not None and (type(url) is not str or not url):
        raise ConfigError(f"hicache storage: `url` is `{url}`; name a remote store, or leave it out")
    return OwnedTerms("sglang", owner, float(seconds), size, Path(path) if path is not None else None, url)
