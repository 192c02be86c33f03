"""A statement is compiled once in a process: the next engine that asks it finds its text."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import Engine, select
from sqlalchemy.sql import compiler

from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.ledger import logs


def _compiled(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many statements one question compiles."""
    compiled: list[object] = []
    begun = compiler.SQLCompiler.__init__

    def counted(self: compiler.SQLCompiler, *given: object, **named: object) -> None:
        compiled.append(self)
        begun(self, *given, **named)  # type: ignore[arg-type]

    with monkeypatch.context() as patch, engine.connect() as connection:
        patch.setattr(compiler.SQLCompiler, "__init__", counted)
        connection.execute(select(logs.c.name).where(logs.c.size == 13, logs.c.id == 5, logs.c.name == "x"))
    return len(compiled)


def test_another_engine_compiles_nothing_again(migrated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = open_store(migrated, read_only=True), open_store(migrated, read_only=True)
    assert _compiled(first, monkeypatch) == 1
    assert _compiled(second, monkeypatch) == 0
    second.update_execution_options(compiled_cache={})  # control: a cache of its own
    assert _compiled(second, monkeypatch) == 1
    first.dispose()
    second.dispose()
