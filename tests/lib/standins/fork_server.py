"""Forks processes for tests that kill -9 them: `go FOLDER NUMBER` forks and prints the id, `wait` reaps.

What a child logs goes to stderr: stdout is the server's answers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import structlog
import torch


def serve(child: Callable[[Path, int], None]) -> None:
    """Until stdin ends; `child` never returns."""
    torch.set_num_threads(1)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "go":
            found = os.fork()
            if not found:
                child(Path(arguments[0]), int(arguments[1]))
            print(found, flush=True)
        else:
            os.wait()
            print("dead", flush=True)
