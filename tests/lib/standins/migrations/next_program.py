"""A program of the next revision, which changes three tables online, and a ledger that its predecessor left.

The program is this one with one revision more. The predecessor's ledger lacks what three tables would then have got: a
column of `decisions` (with months, never empty), an index of `residencies` (with months), and a column of `cases` (one
table, with a foreign key).
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select

from kvcustody.audit.store.database import engine as store
from kvcustody.audit.store.database import open_changes
from kvcustody.audit.store.database.engine import SCHEMA_REVISION, open_store
from kvcustody.audit.store.schema.ledger import metadata
from kvcustody.migrations import upgrade as upgrading

BEFORE = SCHEMA_REVISION
NEXT = f"{int(BEFORE) + 1:04d}"
ChangedRows = dict[str, list[tuple[Any, ...]]]
CHANGED = ("cases", "decisions", "residencies")
_REVISION = f"""
revision = "{NEXT}"
down_revision = "{BEFORE}"
ONLINE = {CHANGED!r}


def upgrade() -> None:
    pass
"""
_TAKEN = (
    "ALTER TABLE decisions DROP COLUMN via",
    "DROP INDEX ix_residencies_log_subject",
    "ALTER TABLE cases DROP COLUMN ends",
)


def become_next(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """From here on this process is the program of the next revision."""
    shutil.copytree(upgrading.VERSIONS, folder / "versions")
    (folder / "versions" / f"{NEXT}_next.py").write_text(_REVISION)
    patch.setattr(upgrading, "VERSIONS", folder / "versions")
    state_revision(patch, NEXT)


def state_revision(patch: pytest.MonkeyPatch, revision: str) -> None:
    """From here on this process takes ledgers of this revision for its own."""
    patch.setattr(store, "SCHEMA_REVISION", revision)
    patch.setattr(open_changes, "SCHEMA_REVISION", revision)


def changed_rows(engine: Engine) -> ChangedRows:
    """The rows of the changed tables, by table."""
    with engine.connect() as connection:
        return {
            name: sorted(map(tuple, connection.execute(select(metadata.tables[name]))), key=repr) for name in CHANGED
        }


def take_back(engine: Engine) -> None:
    """Make a ledger what the predecessor left."""
    with engine.begin() as connection:
        for statement in _TAKEN:
            connection.exec_driver_sql(statement)


def kill_at(url: str, step: str, act: Callable[..., object] = upgrading.upgrade) -> bool:
    """Upgrade in a process that kills itself at a step; whether it came to it."""
    child = os.fork()
    if not child:
        engine = open_store(url, timeout_seconds=20)
        act(engine, leaves_max=None, step=lambda reached: _kill(reached == step))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def _kill(now: bool) -> None:
    if now:
        os.kill(os.getpid(), signal.SIGKILL)
