"""Progress of long work: a bar on stderr, or occasional lines where stderr is no terminal."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvcustody.console.terminal.lines import say

_LINE_SECONDS = 10.0


class _Lines(Progress):
    """Progress without a terminal: a line on stderr at intervals of work."""

    _told_at = 0.0

    def refresh(self) -> None:
        """Print the progress, at most every `_LINE_SECONDS`."""
        now = time.monotonic()
        self._told_at = self._told_at or now
        if now - self._told_at >= _LINE_SECONDS:
            self._told_at = now
            for task in self.tasks:
                of = "" if task.total is None else f" of {task.total:,.0f}"
                say(f"{task.description}: {task.completed:,.0f}{of}", file=sys.stderr, flush=True)

    def update(self, *given: Any, **named: Any) -> None:
        """Set the progress, as a bar's method that needs no drawing thread."""
        super().update(*given, **named)
        self.refresh()

    def advance(self, *given: Any, **named: Any) -> None:
        """Advance the progress, as a bar's method."""
        super().advance(*given, **named)
        self.refresh()


def make_progress() -> Progress:
    """Return a bar on stderr, or lines."""
    console = Console(stderr=True)
    return (Progress if console.is_terminal else _Lines)(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
