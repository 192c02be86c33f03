"""Commands of the ledger, in this process, in the folder of a test."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from typing import Any

from typer.testing import CliRunner, Result

from kvcustody.console.main import app

Run = Callable[..., Result]


def call(line: str, *, exits: int = 0) -> Result:
    """What a command answers; its exit status is checked."""
    made = CliRunner().invoke(app, shlex.split(line))
    assert made.exit_code == exits, (line, made.output, made.stderr)
    return made


def answer(made: Result) -> Any:
    """The JSON that it printed."""
    return json.loads(made.stdout)
