"""Loggers of our modules. structlog is imported when something is logged, which most commands never do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

_LEVELS = ("debug", "info", "warning", "error")
_configure: Callable[[], None] | None = None
_unheard: frozenset[str] = frozenset()  # the levels that the configuration to come drops


def get_logger(name: str) -> Any:
    """structlog's logger of this name; it follows how structlog is configured when it is used."""
    return _Logger(name)


def configure_logging(configure: Callable[[], None], level: str = "debug") -> None:
    """Configure structlog: now where it is imported already, else when a logger of ours is first heard.

    What is below `level` is dropped by `configure`, and until then here.
    """
    global _configure, _unheard  # noqa: PLW0603 - structlog's own configuration is a process's too
    if "structlog" in sys.modules:
        _configure = None
        configure()
    else:
        _configure, _unheard = configure, frozenset(_LEVELS[: _LEVELS.index(level)])


class _Logger:
    __slots__ = ("_made", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self._made: Any = None

    def __getattr__(self, method: str) -> Any:
        if self._made is None:
            if method in _unheard and "structlog" not in sys.modules:
                return _drop
            self._made = _import_structlog().get_logger(self._name)
        return getattr(self._made, method)


def _drop(*_: object, **__: object) -> None:
    """What is below the level to come."""


def _import_structlog() -> Any:
    global _configure
    import structlog

    if _configure is not None:
        configure, _configure = _configure, None
        if not structlog.is_configured():  # nobody else did meanwhile
            configure()
    return structlog
