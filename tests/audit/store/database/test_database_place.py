"""Places of databases: a path is opened exactly as written, and no message contains a password."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import create_engine

from kvcustody.audit.evidence.coverage.recount_process import _target
from kvcustody.audit.evidence.subjects.subject_key_store import store_beside
from kvcustody.audit.store.database.database_place import database_place
from kvcustody.audit.store.database.dialect import file_of
from kvcustody.audit.store.database.engine import WRITE, open_store
from kvcustody.console.policy.sarif_junit import sarif
from kvcustody.errors import CustodyError
from kvcustody.governance.service.settings import load_service_settings
from kvcustody.governance.settings import Settings, is_ledger_of, load_settings
from kvcustody.policies.workbench.validate import validate

NAMES = ("a#b.db", "a?mode=memory.db", "a%41b.db", "a b.db", "ümlaut.db", "a\u200fb.db", "a&b;c+d.db")
ADDRESSES = (
    "postgresql//custody:hunter2@db/kv",
    "postgresql:custody:hunter2@db/kv",
    "postgresql://custody:hunter2@db:port/kv",
    "postgres://custody:hunter2@db/kv",
    "mysql+hunter2://db/kv",
    "custody:hunter2@db/kv",
    "host=db password=hunter2",
    "sqlite://custody:hunter2@db/kv",
    "sqlite:///",
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("folder", ["", "in #1?%25"])
def test_the_named_file_is_opened_for_its_user_alone(tmp_path: Path, folder: str, name: str) -> None:
    path = tmp_path / folder / name
    path.parent.mkdir(exist_ok=True)
    for target in (path, str(path), f"sqlite:///{path}"):
        reader = open_store(target, read_only=True)
        with pytest.raises(Exception, match="unable to open"), reader.connect():
            pass
        assert list(path.parent.iterdir()) == [], "a read creates nothing"
        writer = open_store(target)
        with writer.connect().execution_options(**WRITE) as connection, connection.begin():
            connection.exec_driver_sql("CREATE TABLE here (x)")
        assert file_of(writer) == path and _target(writer) == f"sqlite:///{path}"
        assert [(each.name, each.stat().st_mode & 0o777) for each in path.parent.glob("*.db")] == [(name, 0o600)]
        with reader.connect() as connection, pytest.raises(Exception, match="readonly"):
            connection.exec_driver_sql("CREATE TABLE there (x)")
        for engine in (reader, writer):
            engine.dispose()
        path.unlink()
        path.with_name(f"{name}.lock").unlink()  # the gate of writers
    assert store_beside(f"sqlite:///{path}") == path.with_name(f"{path.stem}-subjects.db")
    assert is_ledger_of(Settings(database_url=f"sqlite:///{path}"), path)


def test_a_path_pasted_into_a_uri_opens_another_file(tmp_path: Path) -> None:
    """The control: what the one reading is for."""
    with create_engine(f"sqlite:///file:{tmp_path}/a#b.db?mode=rwc&uri=true").connect():
        pass
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_that_is_none_makes_no_file_and_is_not_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for read in (open_store, lambda url: load_settings(database_url=url)):
        with pytest.raises(CustodyError) as caught:
            read(address)
        assert "hunter2" not in str(caught.value) + repr(vars(caught.value)) + repr(caught.value.__cause__)
    with pytest.raises(Exception, match="database_url") as caught:
        load_service_settings(database_url=address)
    assert "hunter2" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_passwords_are_masked_wherever_they_stand_in_a_url() -> None:
    url = "postgresql://custody:hunter2@db/kv?password=hunter3&sslpassword=hunter4&passwd=hunter5&sslmode=require"
    settings = load_settings(database_url=url, subject_keys_url=url)
    for text in (database_place(url).masked(), str(settings.shown())):
        assert "hunter" not in text and "custody:***@db/kv" in text and "sslmode=require" in text


def test_a_place_in_sarif_is_a_uri() -> None:
    found = validate("tenants: [", name="a#b %41.yaml")
    assert '"uri": "a%23b%20%2541.yaml"' in sarif(found.problems)
