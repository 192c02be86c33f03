"""A recount of a ledger, in a process of its own where the ledger is large: two implementations, side by side.

1. The answer is the same wherever it is made: a question holds all that it depends on besides the leaves.
2. The other process reads the ledger for itself. Should it have read another state (retention dropped leaves
   meanwhile), or have died, its answer is not taken and the recount is made here, from the snapshot of the tables.
3. Which process makes it is a matter of how many leaves there are, never of how busy the machine is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any, NamedTuple
from urllib.parse import unquote

import orjson
from sqlalchemy import Connection, Engine, func, select

from kvcustody.audit.coverage.recompute import (
    Chosen,
    CoverageFigures,
    Recount,
    Unaccounted,
    count_up,
    judge,
    read_history,
    recompute_digest,
    unaccounted,
)
from kvcustody.audit.coverage.recompute.leaf_sources import leaves_in_database
from kvcustody.audit.database.engine import open_store
from kvcustody.audit.database.gc_pause import gc_paused
from kvcustody.audit.database.snapshot import AsOf, as_of_sizes, is_in
from kvcustody.audit.schema.ledger import events, logs

BESIDE_LEAVES = 30_000  # from here on a second process saves more than its start costs
_MEMORY = ("", ":memory:")


class RecountRequest(NamedTuple):
    """What is recounted: a selection of the state in which the logs have these sizes, by name."""

    chosen: Chosen
    as_of_us: int
    sizes: Mapping[str, int]


class RecountResult(NamedTuple):
    """Figures, what no leaf accounts for, and the population's digest; `leaves` is how many were read."""

    leaves: int
    figures: Recount
    missing: Unaccounted
    digest: str


def _answer(
    connection: Connection, question: RecountRequest, state: AsOf | None, keep: list[object] | None = None
) -> RecountResult:
    with gc_paused():
        history = read_history(leaves_in_database(connection, state))
        if keep is not None:
            keep.append(history)
        judged = list(judge(history, question.chosen, as_of_us=question.as_of_us))
        figures = count_up(judged)
        figures.leaves, figures.as_of_us = history.leaves, question.as_of_us
        return RecountResult(history.leaves, figures, unaccounted(history), recompute_digest(judged))


class RecountProcess:
    """A recount under way; `answer` waits for it."""

    def __init__(self, connection: Connection, question: RecountRequest, state: AsOf | None) -> None:
        self._connection = connection
        self._question = question
        self._state = state
        self._leaves = 0
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Start a process of its own where there are leaves enough for one (rule 3)."""
        query = select(func.count()).select_from(events).where(is_in(self._state, events))
        self._leaves = self._connection.scalar(query) or 0
        target = _target(self._connection.engine)
        if self._leaves < BESIDE_LEAVES or target is None:
            return
        command = [sys.executable, "-P", "-m", "kvcustody.audit.coverage.recount_process"]
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)  # noqa: S603 - ours
        except OSError as problem:
            _warn(str(problem))
            return
        assert self._process.stdin is not None
        chosen, as_of_us, sizes = self._question
        with suppress(BrokenPipeError), self._process.stdin as question:  # who died says so by its status
            question.write(orjson.dumps([target, list(chosen), as_of_us, dict(sizes)]))
        self._process.stdin = None  # `communicate` closes no pipe twice

    def answer(self) -> RecountResult:
        """The answer, from beside or, where that is not to be taken, from here (rule 2)."""
        if self._process is not None:
            made, said = self._process.communicate()
            status, self._process = self._process.returncode, None
            if status == 0:
                found = _from_bytes(made)
                if found.leaves == self._leaves:
                    return found
                said = b"it read another state of the ledger"
            reason = said.decode(errors="replace").strip().splitlines()[-1:] or ["it ended without a word"]
            _warn(reason[0][:200])
        return _answer(self._connection, self._question, self._state)

    def end(self) -> None:
        """Nothing goes on after this."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@contextmanager
def open_recount(
    connection: Connection, chosen: Chosen, as_of_us: int, state: AsOf | None
) -> Iterator[RecountProcess]:
    """Begin a recount of a state (None: of all that the connection sees); it ends with the block."""
    made = RecountProcess(connection, RecountRequest(chosen, as_of_us, _sizes(connection, state)), state)
    made.begin()
    try:
        yield made
    finally:
        made.end()


def _sizes(connection: Connection, state: AsOf | None) -> dict[str, int]:
    """A state by the names of its logs; what the connection sees where there is none."""
    rows = connection.execute(select(logs.c.id, logs.c.name, logs.c.size)).all()
    held = None if state is None else state.sizes
    return {row.name: row.size if held is None else held.get(row.id, 0) for row in rows}


def _target(engine: Engine) -> str | None:
    """What `open_store` opens again in another process; None for a database that only this one has."""
    if engine.dialect.name != "sqlite":
        return engine.url.render_as_string(hide_password=False)
    path = unquote(str(engine.url.database or "").removeprefix("file:").split("?", 1)[0])
    return None if path in _MEMORY else path


def _warn(reason: str) -> None:
    import structlog  # as late as this: the other process, which starts for one answer, warns of nothing

    structlog.get_logger(__name__).warning("recounted in this process", reason=reason)


def _to_bytes(made: RecountResult) -> bytes:
    figures = made.figures
    rows = [[*who, list(asdict(row).values())] for who, row in figures.rows.items()]
    lags = list(figures.lags.items())
    return orjson.dumps([made.leaves, figures.as_of_us, rows, lags, list(made.missing), made.digest])


def _from_bytes(data: bytes) -> RecountResult:
    leaves, as_of_us, rows, lags, missing, digest = orjson.loads(data)
    figures = Recount(leaves=leaves, as_of_us=as_of_us)
    figures.rows = {(tenant, classification): CoverageFigures(*row) for tenant, classification, row in rows}
    figures.lags = dict(lags)
    return RecountResult(leaves, figures, Unaccounted(*missing), digest)


def main() -> None:
    """Answer the question on standard input: where the ledger is, and a `RecountRequest`."""
    asked: list[Any] = orjson.loads(sys.stdin.buffer.read())
    target, chosen, as_of_us, sizes = asked
    engine = open_store(target, read_only=True, timeout_seconds=30, mapped=True)
    with engine.connect() as connection:
        if connection.dialect.name != "sqlite":
            connection.execution_options(isolation_level="REPEATABLE READ")
        question = RecountRequest(Chosen(*chosen), as_of_us, sizes)
        kept: list[object] = []
        made = _answer(connection, question, as_of_sizes(connection, sizes), kept)
        sys.stdout.buffer.write(_to_bytes(made))
        sys.stdout.buffer.flush()
        os._exit(0)  # to take a million leaves' objects apart one by one is no use to anybody


if __name__ == "__main__":
    main()
