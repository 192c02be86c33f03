"""Every table of a ledger has one class, which says how `fsck` knows what it should hold."""

import pytest
from sqlalchemy import Column, Integer, MetaData, Table

from kvcustody.audit.store.schema.all_tables import every_table, projections
from kvcustody.audit.verify.ledger import table_classes as module
from kvcustody.audit.verify.ledger.table_classes import TableClass, table_classes
from standins.audit.projection_oracle import TABLES


def test_every_table_has_a_class_and_the_second_opinion_has_those_of_leaves() -> None:
    classes = table_classes()
    assert [*classes] == [*every_table()] and {*classes.values()} == {*TableClass}
    of_leaves = {table.name for table, its in classes.items() if its is TableClass.LEAF}
    assert of_leaves == {table.name for table in projections()} == {*TABLES, "event_traces"}


def test_a_table_without_a_class_or_with_two_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    new = Table("new", MetaData(), Column("id", Integer, primary_key=True))
    monkeypatch.setattr(module, "every_table", lambda: (*every_table(), new))
    with pytest.raises(KeyError, match="new"):
        table_classes.__wrapped__()
    monkeypatch.undo()
    monkeypatch.setitem(module._CLASSES, TableClass.SUM, ("counters", "tenants"))
    with pytest.raises(KeyError, match="two classes"):
        table_classes.__wrapped__()
