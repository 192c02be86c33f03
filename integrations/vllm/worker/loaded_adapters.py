"""The adapter files that the workers of this process have read; the next step reports them to the scheduler's side.

vLLM reads an adapter when a step needs it, and again whenever its own cache has dropped it or somebody asks for it in
place. So only the worker knows which files its weights are of.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from kvcustody.governance.identity.content_digest import FileFacts, file_facts


class LoadedAdapter(NamedTuple):
    """An adapter whose weights were read from these files."""

    lora_int_id: int
    lora_path: str
    facts: FileFacts


_loaded: deque[LoadedAdapter] = deque()


def take_loaded() -> list[LoadedAdapter]:
    """Return the adapters read since the last call."""
    taken = []
    while _loaded:
        taken.append(_loaded.popleft())
    return taken


def noting_loads(load: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `WorkerLoRAManager._load_adapter`. Files that change meanwhile count as unknown."""

    @functools.wraps(load)
    def loaded(self: Any, lora_request: Any, *given: Any, **named: Any) -> Any:
        path = str(lora_request.lora_path)
        before = file_facts(path)
        weights = load(self, lora_request, *given, **named)
        facts = file_facts(path)
        _loaded.append(
            LoadedAdapter(int(lora_request.lora_int_id), path, facts if facts == before else FileFacts.unknown())
        )
        return weights

    return loaded
