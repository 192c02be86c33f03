"""A pytest plugin for vLLM's own tests (own_suite): every cache manager and pool that they make becomes a governed one.

- `classes`: the governed classes without custody, which promise to be vLLM's own then.
- `custody`: with an engine port that hears of everything, as in a governed engine. vLLM's hashes stay, because its
   tests compare them, and every request is one tenant's: what may be read is tested elsewhere, what is told here. After
   each test the port's invariants and its scan against vLLM's pool must be clean.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

_books: list[Any] = []
_refused: list[Any] = []


def pytest_configure() -> None:
    """Before any test module is imported."""
    {"classes": _inject_classes, "custody": _inject_custody}[os.environ["KVCUSTODY_INJECTED"]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """The test, then the books."""
    _books.clear()
    result = yield
    for books in _books:
        books.agree()
    return result


def _inject_classes() -> None:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    from kvcustody.integrations.vllm.scheduler.block_pool import GovernedBlockPool
    from kvcustody.integrations.vllm.scheduler.cache_manager import GovernedKVCacheManager

    _afterwards(BlockPool, lambda pool: setattr(pool, "__class__", GovernedBlockPool))
    _afterwards(KVCacheManager, lambda manager: setattr(manager, "__class__", GovernedKVCacheManager))


def _inject_custody() -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    from kvcustody.errors import ConfigError
    from standins.engines.vllm.listening import listen

    def govern(manager: Any) -> None:
        try:
            _books.append(listen(manager, Path(tempfile.gettempdir())))
        except ConfigError:
            _refused.append(manager)  # an engine with this manager does not start under governance

    _afterwards(KVCacheManager, govern)


def _afterwards(kind: type, then: Any) -> None:
    """Call `then` on every new object of exactly `kind`, when it is complete."""
    builds = kind.__init__  # type: ignore[misc]

    def init(self: Any, *arguments: Any, **named: Any) -> None:
        builds(self, *arguments, **named)
        if type(self) is kind:
            then(self)

    kind.__init__ = init  # type: ignore[misc]
