"""Starts `kvcustody up`, or `kvcustody demo fleet`, in a process of its own, as tests of them do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

PROGRAM = str(Path(sys.executable).with_name("kvcustody"))


class Started(NamedTuple):
    process: subprocess.Popen[str]
    said: dict[str, Any]
    began: float

    @property
    def seconds(self) -> float:
        """Since it said where it is."""
        return time.monotonic() - self.began

    def end(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


def start(folder: Path, *more: str, command: Sequence[str] = ("up",)) -> Started:
    """It in a folder of its own, once it says where it is."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVCUSTODY_")}
    process = subprocess.Popen(
        [PROGRAM, *command, "--json", *more],
        cwd=folder,
        env=environment | {"TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    text = ""
    assert process.stdout is not None
    while not text.endswith("\n}\n"):
        line = process.stdout.readline()
        assert line, process.stderr.read() if process.stderr else ""
        text += line
    return Started(process, json.loads(text), time.monotonic())
