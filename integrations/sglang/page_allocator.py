"""SGLang's page allocator under governance: it counts allocated pages and withholds those that failed verification."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvcustody.errors import ConfigError
from kvcustody.integrations.sglang.page_tree import Pages

_ALLOCATORS = ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator")


def _governed_class(kind: type[Any]) -> type[Any]:
    """Return a subclass of `kind` without other bases, so that an existing allocator can become one."""

    class GovernedAllocator(kind):  # type: ignore[misc]
        free_pages: Any

        def alloc(self, need_size: int) -> Any:
            """Allocate whole pages as SGLang does, or return None."""
            found = super().alloc(need_size)
            if found is not None:
                self.kvcustody_allocated += need_size // self.page_size
            return found

        def alloc_extend(self, *given: Any, **named: Any) -> Any:
            """Allocate as SGLang does."""
            return self._counted(super().alloc_extend, *given, **named)

        def alloc_decode(self, *given: Any, **named: Any) -> Any:
            """Allocate as SGLang does."""
            return self._counted(super().alloc_decode, *given, **named)

        def _counted(self, call: Any, *given: Any, **named: Any) -> Any:
            before = self.free_pages.numel()
            found = call(*given, **named)
            self.kvcustody_allocated += before - self.free_pages.numel()
            return found

        def free(self, free_index: torch.Tensor) -> None:
            """Free as SGLang does, without withheld pages."""
            super().free(free_index)
            self._keep_back()

        def free_page_ids(self, page_ids: torch.Tensor) -> None:
            """Free as SGLang does, without withheld pages."""
            super().free_page_ids(page_ids)
            self._keep_back()

        def free_group_end(self) -> None:
            """Free as SGLang does, without withheld pages."""
            super().free_group_end()
            self._keep_back()

        def clear(self) -> None:
            """Clear as SGLang does, without withheld pages."""
            super().clear()
            self._keep_back()

        def withhold(self, pages: Pages) -> None:
            """Never allocate these pages again."""
            self.kvcustody_withheld.update(pages.tolist())
            self._keep_back()

        def _keep_back(self) -> None:
            if self.kvcustody_withheld:
                held = torch.tensor(sorted(self.kvcustody_withheld), dtype=torch.int64, device=self.device)
                self.free_pages = self.free_pages[~torch.isin(self.free_pages, held)]

    GovernedAllocator.__name__ = f"Governed{kind.__name__}"
    return GovernedAllocator


def govern_allocator(allocator: Any) -> None:
    """Make `allocator` count and withhold.

    Raises:
        ConfigError: it is not one of SGLang's known classes.
    """
    kind = type(allocator)
    if kind.__name__ not in _ALLOCATORS or not kind.__module__.startswith("sglang."):
        raise ConfigError(
            f"the KV pool's allocator is a `{kind.__name__}`, which is not governed; start SGLang without sliding "
            "windows, recurrent layers, sharded pages and sparse pools",
            allocator=kind.__name__,
        )
    if allocator.need_sort:
        raise ConfigError("the KV pool's allocator holds freed pages back and sorts them; that is not governed")
    allocator.kvcustody_withheld = set()
    allocator.kvcustody_allocated = 0
    allocator.__class__ = _governed_class(kind)


def page_ids(pages: Pages, device: Any) -> torch.Tensor:
    """Return pages in the allocator's form."""
    return torch.from_numpy(np.ascontiguousarray(pages)).to(device)
