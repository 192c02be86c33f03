"""Statements as text: the same answers one by one and together, and failures as SQLAlchemy's."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, event
from sqlalchemy.exc import SQLAlchemyError

from kvcustody.audit.store.database.dialect import fetch_all, fetch_pipelined

SIZES = (1, 1 << 20, 1 << 40)  # psycopg would send each as another type
QUESTIONS = [("SELECT name FROM workers WHERE id = ?", (size,)) for size in SIZES]


def test_together_is_what_one_by_one_is(any_store: Engine) -> None:
    with any_store.connect() as connection:
        for size in SIZES:
            connection.exec_driver_sql(f"INSERT INTO workers (id, name) VALUES ({size % (1 << 30) + 7}, 'w{size}')")
        asked = [("SELECT name FROM workers WHERE id = ?", (size % (1 << 30) + 7,)) for size in SIZES]
        found = fetch_pipelined(connection, asked)
        assert [[tuple(row) for row in rows] for rows in found] == [[(f"w{size}",)] for size in SIZES]
        assert [list(rows) for rows in found] == [list(fetch_all(connection, *question)) for question in asked]


def test_a_question_that_fails_is_sqlalchemys_error_and_the_connection_goes_on(any_store: Engine) -> None:
    with any_store.connect() as connection:
        with pytest.raises(SQLAlchemyError, match="no_such_table"):
            fetch_pipelined(connection, [*QUESTIONS, ("SELECT 1 FROM no_such_table", ()), *QUESTIONS])
        connection.rollback()
        assert [list(rows) for rows in fetch_pipelined(connection, QUESTIONS)] == [[], [], []]


def test_what_is_asked_together_is_in_the_transaction(any_store: Engine) -> None:
    """It begins one as any question does, so a session's own settings hold in it, and is taken back with it."""
    begun: list[bool] = []
    event.listen(any_store, "begin", lambda _: begun.append(True))
    with any_store.connect() as connection:
        fetch_pipelined(connection, QUESTIONS)
        assert begun == [True] and connection.in_transaction()
        connection.exec_driver_sql("INSERT INTO workers (id, name) VALUES (1, 'first')")
        assert [len(rows) for rows in fetch_pipelined(connection, QUESTIONS)] == [1, 0, 0]
        connection.rollback()
        assert [len(rows) for rows in fetch_pipelined(connection, QUESTIONS)] == [0, 0, 0]
        assert len(begun) == 2


def test_integers_of_every_size_are_one_type(any_store: Engine) -> None:
    """A prepared statement has its parameters' types: with those of psycopg's choice there would be three of these."""
    if any_store.dialect.name == "sqlite":
        pytest.skip("SQLite's parameters have no types")
    with any_store.connect() as connection:
        types = {fetch_all(connection, "SELECT pg_typeof(?)::text", (size,))[0][0] for size in SIZES}
        assert types == {"bigint"}
