"""Canonical tag-length-value bytes: the only way values become key-derivation input.

- Injective: different (schema, version, fields) give different bytes, because `decode(encode(x)) == x` for
  every x.
- No value can pose as another: each carries its tag, its type and its length. 1, 1.0, true, "1" and b"1"
  all differ, and so do a missing field (`None`), an empty text and an empty list.
- A schema's field list is fixed per version: a field that does not apply is encoded as `None`, never left
  out.

    record := "KVC" 0x01  u8 length, schema name (ASCII)  u16 version  u16 field count  field*
    field  := u16 tag (ascending)  value
    value  := u8 type  u32 length  content          all integers big-endian
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

Value: TypeAlias = "bool | int | float | str | bytes | tuple[Value, ...] | Mapping[str, Value] | None"

_MAGIC = b"KVC\x01"
_NONE, _BOOL, _INT, _FLOAT, _TEXT, _BYTES, _LIST, _MAP = range(8)
_VALUE_HEAD = struct.Struct(">BI")
_DEPTH_MAX = 16


class TlvRecord(NamedTuple):
    """A decoded record."""

    schema: str
    version: int
    fields: dict[int, Value]


def encode(schema: str, version: int, fields: Mapping[int, Value]) -> bytes:
    """Return the canonical bytes of a record; raises `TypeError` or `ValueError` for a value that has no encoding."""
    name = schema.encode("ascii")
    parts = [_MAGIC, struct.pack(">B", len(name)), name, struct.pack(">HH", version, len(fields))]
    for tag in sorted(fields):
        parts.append(struct.pack(">H", tag))
        parts.append(_value(fields[tag], 0))
    return b"".join(parts)


def decode(data: bytes) -> TlvRecord:
    """Return the record of canonical bytes; raises `ValueError` for anything that `encode` does not write."""
    reader = _Reader(data)
    if reader.take(len(_MAGIC)) != _MAGIC:
        raise ValueError("not a tag-length-value record")
    schema = reader.take(reader.take(1)[0]).decode("ascii")
    version, count = struct.unpack(">HH", reader.take(4))
    fields: dict[int, Value] = {}
    for _ in range(count):
        (tag,) = struct.unpack(">H", reader.take(2))
        fields[tag] = reader.value(0)
    reader.end()
    if encode(schema, version, fields) != data:
        raise ValueError("not in canonical form")
    return TlvRecord(schema, version, fields)


def _value(value: Value, depth: int) -> bytes:
    kind, content = _content(value, depth)
    return _VALUE_HEAD.pack(kind, len(content)) + content


def _content(value: Value, depth: int) -> tuple[int, bytes]:
    """The type and content of one value. Exact types only: a subclass could carry more than its bytes."""
    if depth > _DEPTH_MAX:
        raise ValueError(f"values nest deeper than {_DEPTH_MAX}")
    kind = type(value)
    if kind is str:
        return _TEXT, value.encode("utf-8")  # type: ignore[union-attr]
    if value is None:
        return _NONE, b""
    if kind is bytes:
        return _BYTES, value  # type: ignore[return-value]
    if kind is bool:
        return _BOOL, b"\x01" if value else b"\x00"
    if kind is int:
        return _INT, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True)  # type: ignore[union-attr]
    if kind is float:
        if math.isnan(value):  # type: ignore[arg-type]
            raise ValueError("nan has no canonical encoding")
        return _FLOAT, struct.pack(">d", value)
    if kind is tuple:
        return _LIST, b"".join([_value(item, depth + 1) for item in value])  # type: ignore[union-attr]
    if isinstance(value, Mapping):
        if any(type(key) is not str for key in value):
            raise TypeError("a map's keys must be text")
        pairs = sorted((key.encode("utf-8"), item) for key, item in value.items())
        return _MAP, b"".join([_value(k, depth + 1) + _value(item, depth + 1) for k, item in pairs])
    raise TypeError(f"`{kind.__name__}` has no encoding")


class _Reader:
    """A cursor over canonical bytes that never reads past a declared end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        piece = self._data[self._at : self._at + count]
        if len(piece) != count:
            raise ValueError("truncated record")
        self._at += count
        return piece

    def end(self) -> None:
        if self._at != len(self._data):
            raise ValueError("bytes after the end of the record")

    def more(self) -> bool:
        return self._at < len(self._data)

    def value(self, depth: int) -> Value:
        if depth > _DEPTH_MAX:
            raise ValueError(f"values nest deeper than {_DEPTH_MAX}")
        kind, length = _VALUE_HEAD.unpack(self.take(_VALUE_HEAD.size))
        content = self.take(length)
        if kind == _NONE:
            return None
        if kind == _BOOL:
            return content == b"\x01"
        if kind == _INT:
            return int.from_bytes(content, "big", signed=True)
        if kind == _FLOAT and length == 8:
            return float(struct.unpack(">d", content)[0])
        if kind == _TEXT:
            return content.decode("utf-8")
        if kind == _BYTES:
            return content
        inner = _Reader(content)
        items: list[Value] = []
        while inner.more():
            items.append(inner.value(depth + 1))
        if kind == _LIST:
            return tuple(items)
        if kind == _MAP and len(items) % 2 == 0:
            return _mapping(items)
        raise ValueError(f"unknown value type `{kind}`")


def _mapping(items: list[Value]) -> dict[str, Value]:
    mapping: dict[str, Value] = {}
    for key, value in zip(items[::2], items[1::2], strict=True):
        if type(key) is not bytes:
            raise ValueError("a map's key is not text")
        mapping[key.decode("utf-8")] = value
    return mapping
