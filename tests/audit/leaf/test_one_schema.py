"""One declaration for each kind: a new field is in the leaf, its columns, its check and its compatibility."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import orjson
import pytest

from kvcustody.audit.kinds import ResidencyReleased
from kvcustody.audit.kinds.block_runs import Run
from kvcustody.audit.kinds.event import FieldMeaning, WordList, Words, WorkersLifecycleEvent
from kvcustody.audit.leaf import Context, leaf_schema, leaves
from kvcustody.audit.leaf.batch import read_leaves
from kvcustody.errors import LedgerError

CONTEXT = Context("ab" * 16, 0, lambda tenant, subject, session="": "p" * 24)
RUNS = (Run(np.arange(4), 9),)
BEFORE = ResidencyReleased(5, 1, "acme", "finish", RUNS, 7)
OLD = leaves(BEFORE, CONTEXT, 3)[0].data


class Wider(ResidencyReleased, frozen=True, tag="residency-released"):
    """The same kind in a later version."""

    further: int = 2
    words: WordList = ("none",)


@pytest.fixture
def wider(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is of the later version: nothing but the declaration is another."""
    schema = leaf_schema.schema_of(Wider)
    monkeypatch.setitem(leaf_schema.SCHEMAS, Wider, schema)
    monkeypatch.setitem(leaf_schema.SCHEMA_OF_NAME, schema.name, schema)
    monkeypatch.setitem(leaf_schema.DECODE, schema.name.encode(), schema.decode)
    yield


def after(**said: object) -> bytes:
    return leaves(Wider(*(getattr(BEFORE, name) for name in BEFORE.__struct_fields__))._replace(**said), CONTEXT, 3)[
        0
    ].data


@pytest.mark.usefixtures("wider")
def test_a_field_that_is_added_is_in_the_leaf_and_its_columns() -> None:
    new = after(further=2**53, words=("own", "grant"))
    assert orjson.loads(new) == orjson.loads(OLD) | {"further": str(2**53), "words": ["own", "grant"]}
    assert new == orjson.dumps(orjson.loads(new), option=orjson.OPT_SORT_KEYS)
    [group] = read_leaves([new], canonical=True).groups
    assert group.columns["further"] == [2**53] and group.columns["words"] == [["own", "grant"]]


@pytest.mark.usefixtures("wider")
def test_a_leaf_of_the_version_before_says_the_default_beside_one_that_has_the_field() -> None:
    [group] = read_leaves([OLD, after(further=5), OLD], canonical=True).groups
    assert group.columns["further"] == [2, 5, 2]
    assert group.columns["words"] == [("none",), ["none"], ("none",)]


@pytest.mark.usefixtures("wider")
@pytest.mark.parametrize("wrong", ["5", 5.0, None, True, -(2**53), str(5), f"{2**53:020d}"])
def test_a_field_that_is_added_is_checked_by_its_type(wrong: object) -> None:
    body = orjson.loads(after()) | {"further": wrong}
    with pytest.raises(LedgerError):
        read_leaves([orjson.dumps(body, option=orjson.OPT_SORT_KEYS)], canonical=True)
    with pytest.raises(LedgerError, match="`further` of `residency-released`"):
        after(further=None if wrong is True else str(wrong))


def test_the_version_before_reads_what_a_later_one_wrote_and_takes_none_of_it_from_a_worker() -> None:
    """Control: without the declaration the field is unknown."""
    body = orjson.loads(OLD) | {"further": 5}
    line = orjson.dumps(body, option=orjson.OPT_SORT_KEYS)
    [group] = read_leaves([line]).groups
    assert "further" not in group.columns
    with pytest.raises(LedgerError, match="canonical"):
        read_leaves([line], canonical=True)


class Unstated(WorkersLifecycleEvent, frozen=True, tag="unstated"):
    """A kind that workers hand in, with a text that names nobody knows whom."""

    whom: str


class Stated(WorkersLifecycleEvent, frozen=True, tag="stated"):
    """The same, with a stated meaning."""

    whom: Words


def test_a_workers_kind_with_a_text_of_no_meaning_cannot_be_loaded() -> None:
    with pytest.raises(TypeError, match=r"Unstated\.whom: state what it names"):
        leaf_schema.schema_of(Unstated)
    assert leaf_schema.schema_of(Stated).meanings == {"whom": FieldMeaning.WORDS}, "control"
