"""The leaves recorded in `recorded_leaves.jsonl` are written the same, byte for byte, and read the same.

A line of the file has two parts: an event of some kind with its leaves, and the rows that are made from them.

- `fields` are the event's. A run is given as generation, pool, first block, step, count and modulus.
- Long leaves are given by size and SHA-256.
- In place of an event, a line may have a leaf as an earlier version wrote it.

Where a kind has a new field, `PYTHONPATH=tests/lib python tests/audit/leaf/test_recorded.py` records it anew. Check the
difference.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec
import pytest

from kvcustody.audit.leaf import leaves
from kvcustody.audit.leaf.batch import read_leaves
from kvcustody.audit.leaf.change_items import plain_bodies
from kvcustody.audit.project import COUNTED_KEYS, IncarnationRow, count_events, project, rows_of
from kvcustody.errors import LedgerError
from standins.audit.recorded_events import CONTEXT, KIND_OF, OLDER, PLACE, RECORDED, WRITTEN, event_of


def projected(data: list[bytes]) -> dict[str, list[Any]]:
    """Every row of these leaves, by table; their log is 1."""
    life = IncarnationRow(5, CONTEXT.offset_us)
    made = project(read_leaves(data), [1] * len(data), range(len(data)), lambda uuid: life)
    return {table.name: [list(row) for some in columns for row in rows_of(some)] for table, columns in made.items()}


def record_of(recorded: dict[str, Any]) -> dict[str, Any]:
    """What is written now of an event that was recorded."""
    made = [leaf.data for leaf in leaves(event_of(recorded), CONTEXT, recorded["sequence"])]
    if "leaves" in recorded:
        return {"rows": projected(made), "leaves": [data.decode() for data in made]}
    digest = hashlib.sha256(b"\n".join(made)).hexdigest()
    return {"rows": projected(made), "widths": [*map(len, made)], "sha256": digest}


@pytest.mark.parametrize("recorded", WRITTEN, ids=lambda each: f"{each['sequence']}-{each['kind']}")
def test_an_event_is_written_as_it_was_recorded(recorded: dict[str, Any]) -> None:
    assert recorded == recorded | record_of(recorded)


@pytest.mark.parametrize("recorded", OLDER, ids=lambda each: json.loads(each["leaf"])["kind"])
def test_a_leaf_of_an_earlier_version_is_read_as_it_was(recorded: dict[str, Any]) -> None:
    assert projected([recorded["leaf"].encode()]) == recorded["rows"]


def test_an_item_that_lacks_its_last_values_says_their_defaults() -> None:
    """A field that is added to a kind of items leaves items of earlier versions readable; one without default not."""

    def read(body: dict[str, Any]) -> tuple[Any, ...]:
        data = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
        return projected([data]), [*plain_bodies(body)]

    bodies = [json.loads(line) for each in WRITTEN for line in each.get("leaves", ())]
    body = next(each for each in bodies if each.get("ended") and each["ended"][0][-1] is None)
    whole = read(body)
    body["ended"][0].pop()
    assert read(body) == whole
    body["ended"][0].pop()
    with pytest.raises(LedgerError):
        read(body)


def test_every_kind_that_has_a_leaf_is_recorded_with_every_field_and_without() -> None:
    for name, kind in KIND_OF.items():
        given = [each["fields"].keys() for each in WRITTEN if each["kind"] == name]
        fields = msgspec.structs.fields(kind)
        needed, every = ({field.name for field in fields if field.required or full} for full in (False, True))
        assert (needed in given and every in given) or name == "hit-counted"
    assert len(OLDER) > 10


def test_keys_that_figures_are_made_of_are_enough() -> None:
    """Of every kind and version of leaf that was recorded. With its control: one key less is seen."""
    data = [made.data for each in WRITTEN for made in leaves(event_of(each), CONTEXT, each["sequence"])]
    data += [each["leaf"].encode() for each in OLDER]
    whole = count_events(read_leaves(data), range(len(data)))
    assert count_events(read_leaves(data, keys=COUNTED_KEYS), range(len(data))) == whole
    for key in ("at_us", "part", "classification", "reader", "revision", "level", "tier", "cause", "numbers"):
        with pytest.raises((KeyError, AssertionError)):
            fewer = read_leaves(data, keys=COUNTED_KEYS - {key})
            assert count_events(fewer, range(len(data))) == whole


if __name__ == "__main__":
    written = [each | record_of(each) if "fields" in each else each for each in RECORDED]
    lines = (json.dumps(each, separators=(",", ":"), ensure_ascii=False) + "\n" for each in written)
    PLACE.write_bytes("".join(lines).encode())
