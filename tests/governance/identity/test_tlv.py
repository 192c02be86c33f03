"""Canonical encodings T1-T3; red-team case A4 (salt confusion); committed test vectors."""

from __future__ import annotations

import itertools
import json
import random
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcustody.governance.identity import tlv

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "tlv.json").read_text())

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4).map(tuple) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
).filter(lambda value: _encodable(value))  # noqa: PLW0108 - defined below
records = st.dictionaries(st.integers(0, 65_535), values, max_size=6)


def _encodable(value: Any) -> bool:
    try:
        tlv.encode("s", 1, {1: value})
    except ValueError:
        return False
    return True


def _typed(value: Any) -> Any:
    """A form under which Python's `==` tells 1 from True and 1.0, and 0.0 from -0.0."""
    if isinstance(value, tuple):
        return "tuple", *map(_typed, value)
    if isinstance(value, dict):
        return "dict", *sorted((key, repr(_typed(item))) for key, item in value.items())
    return type(value).__name__, repr(value)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(records)
def test_a_record_decodes_to_itself(fields: dict[int, Any]) -> None:
    decoded = tlv.decode(tlv.encode("kvcustody/test", 3, fields))
    assert (decoded.schema, decoded.version) == ("kvcustody/test", 3)
    assert {tag: _typed(v) for tag, v in decoded.fields.items()} == {t: _typed(v) for t, v in fields.items()}


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(records, st.data())
def test_a_damaged_record_is_refused_or_is_another_record(fields: dict[int, Any], data: st.DataObject) -> None:
    encoded = bytearray(tlv.encode("kvcustody/test", 3, fields))
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] ^= data.draw(st.integers(1, 255))
    try:
        decoded = tlv.decode(bytes(encoded))
    except (ValueError, OverflowError):
        return
    assert tlv.encode(*decoded) == bytes(encoded) != tlv.encode("kvcustody/test", 3, fields)


@pytest.mark.parametrize("vector", VECTORS, ids=[vector["name"] for vector in VECTORS])
def test_committed_vectors(vector: dict[str, Any]) -> None:
    fields = {int(tag): _from_json(value) for tag, value in vector["fields"].items()}
    assert tlv.encode(vector["schema"], vector["version"], fields).hex() == vector["hex"]
    assert tlv.decode(bytes.fromhex(vector["hex"])).fields == fields


@pytest.mark.parametrize("value", [float("nan"), {1}, object(), bytearray(b"x"), [1], "\ud800"])
def test_values_without_an_encoding_are_refused(value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        tlv.encode("s", 1, {1: value})


def test_nesting_is_bounded_in_both_directions() -> None:
    value: Any = ()
    for _ in range(20):
        value = (value,)
    with pytest.raises(ValueError, match="deeper"):
        tlv.encode("s", 1, {1: value})


# Pieces chosen so that concatenation and every usual separator confuse some pair of tuples.
_PIECES: list[Any] = [None, "", 0, 1, -1, 10, 1.0, True, False, b"", b"1", "None", "null", "1.0", (), ("1",)]
_ALPHABET = ["1", "2", "0", "a", "A", ":", "|", "\x00", "/", "é", unicodedata.normalize("NFD", "é"), ","]


def _adversarial(count: int) -> set[tuple[Any, ...]]:
    random_ = random.Random(4)
    texts = ["".join(letters) for n in (1, 2) for letters in itertools.product(_ALPHABET, repeat=n)]
    chosen: dict[Any, tuple[Any, ...]] = {}
    while len(chosen) < count:
        row = tuple(random_.choice(_PIECES) if random_.random() < 0.4 else random_.choice(texts) for _ in range(3))
        chosen[_typed(row)] = row
    return set(chosen.items())  # type: ignore[arg-type]


def _collisions(rows: set[tuple[Any, ...]], encode: Callable[[tuple[Any, ...]], Any]) -> int:
    return len(rows) - len({encode(row) for _, row in rows})


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _check_salt_confusion(count: int) -> None:
    rows = _adversarial(count)
    assert _collisions(rows, lambda row: tlv.encode("kvcustody/a4", 1, dict(enumerate(row, 1)))) == 0
    assert _collisions(rows, lambda row: "".join(map(_text, row))) > count // 100
    assert _collisions(rows, lambda row: ":".join(map(_text, row))) > 0


def test_salt_confusion() -> None:
    """A4, small: 20,000 adversarial tuples, no two with the same bytes; both joined encodings collide."""
    _check_salt_confusion(20_000)


@pytest.mark.soak
def test_salt_confusion_at_full_size() -> None:
    """A4, full: 10^6 adversarial tuples."""
    _check_salt_confusion(1_000_000)


def test_the_small_table_of_organisation_and_salt() -> None:
    """A4's own table: 21 x 21 (organisation, salt) pairs."""
    parts = ["", "1", "12", "123", "2", "23", "3", "a", "A", "a1", "1a", ":", "1:", ":1", "a:", ":a", "::",
             "01", "001", "é", unicodedata.normalize("NFD", "é")]  # fmt: skip
    pairs = list(itertools.product(parts, repeat=2))
    assert len({tlv.encode("kvcustody/a4", 1, {1: a, 2: b}) for a, b in pairs}) == len(pairs) == 441
    assert len({a + b for a, b in pairs}) < 441
    assert len({f"{a}:{b}" for a, b in pairs}) < 441


def _from_json(value: Any) -> Any:
    """JSON has no bytes and no tuples: `{"bytes": hex}` and lists stand for them."""
    if isinstance(value, dict) and set(value) == {"bytes"}:
        return bytes.fromhex(value["bytes"])
    if isinstance(value, dict):
        return {key: _from_json(item) for key, item in value.items()}
    return tuple(map(_from_json, value)) if isinstance(value, list) else value
