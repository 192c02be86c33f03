"""Orders of text do not depend on the collation of the database: ledgers of tests have a distribution's, servers C."""

from __future__ import annotations

import psycopg
import pytest
from sqlalchemy import Engine

from standins.postgres import distribution_locale

pytestmark = pytest.mark.skipif(
    distribution_locale() == "C",
    reason="this machine has no locale but C (Debian: package `locales`, `locale-gen`)",
)
ASKED = "SELECT 'b' < 'C'"


def test_ledgers_of_tests_order_text_as_people_do(postgres: str, postgres_store: Engine) -> None:
    """So every suite on PostgreSQL runs under such a collation. Control: the server beside it has C."""
    with postgres_store.connect() as connection:
        assert connection.exec_driver_sql(ASKED).scalar() is True
    with psycopg.connect(postgres) as other:
        assert other.execute(ASKED).fetchone() == (False,)
