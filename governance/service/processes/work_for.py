"""The party that the service works for at the moment, for long work."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import NamedTuple


def _stays() -> bool:
    return False


class WorkFor(NamedTuple):
    """The requesting party, and whether it has gone: work that nobody waits for ends."""

    party: str = ""
    has_gone: Callable[[], bool] = _stays


WORK_FOR: ContextVar[WorkFor] = ContextVar("kvcustody_asker", default=WorkFor())  # noqa: B039 - it never changes
