"""The three forms of an export's files: leaves as lines, as a table for spreadsheets, as a table for analysis.

1. Every form holds the canonical bytes of each leaf unchanged; what else it holds is derived from them, and a
   verifier reads the bytes alone.
2. A text cell that a spreadsheet would take for a formula is written behind an apostrophe.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Any

import orjson

from kvcustody.audit.exports.csv_table import csv_text
from kvcustody.audit.tlog.backend import arrow
from kvcustody.audit.tlog.tiles import ExportError

COLUMNS = (
    "log", "idx", "at_us", "kind", "outage", "incarnation", "sequence", "part", "parts", "tenant", "reader", "owner",
    "action", "effect", "outcome", "cause", "actor", "classification", "revision", "residency", "blocks", "reasons",
    "trace", "leaf",
)  # fmt: skip
_NUMBERS = frozenset(
    {"idx", "at_us", "sequence", "part", "parts", "revision", "residency", "blocks"},
)
_LINE_BYTES_MAX = 1 << 16


class LeafFormat(StrEnum):
    """The format of an export's leaves."""

    NDJSON = "ndjson"
    CSV = "csv"
    PARQUET = "parquet"


def encode(form: LeafFormat, log: str, first: int, leaves: Sequence[bytes]) -> bytes:
    """Return a file with these leaves, the first of which is leaf `first` of the log; raises `ExportError`."""
    if form is LeafFormat.NDJSON:
        return b"".join(leaf + b"\n" for leaf in leaves)
    return _ENCODERS[form](_rows(log, first, leaves))


def leaves_of(form: LeafFormat, path: Path) -> Iterator[bytes]:
    """Return the leaves in a file, in order; raises `ExportError` if it has another form."""
    return _READERS[form](path)


def _rows(log: str, first: int, leaves: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    for idx, leaf in enumerate(leaves, first):
        body = orjson.loads(leaf)
        row = {name: body.get(name) for name in COLUMNS}
        row |= {"log": log, "idx": idx, "leaf": leaf, "reasons": " ".join(body.get("reasons", ())) or None}
        yield row


def _csv(rows: Iterator[dict[str, Any]]) -> bytes:
    cells = ([_cell(row[name]) for name in COLUMNS] for row in rows)
    return csv_text(chain([COLUMNS], cells)).encode()


def _cell(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def _csv_leaves(path: Path) -> Iterator[bytes]:
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.reader(file, strict=True)
        try:
            if next(reader, None) != list(COLUMNS):
                raise ExportError(f"`{path.name}` does not have the columns of an export", path=path)
            for row in reader:
                yield row[-1].encode()
        except (csv.Error, UnicodeError, IndexError) as problem:
            raise ExportError(f"`{path.name}` is not a CSV file: {problem}", path=path) from None


def _ndjson_leaves(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while line := file.readline(_LINE_BYTES_MAX):
            if line[-1:] != b"\n":
                raise ExportError(f"`{path.name}` has a line that is too long or cut off", path=path)
            yield line[:-1]


def _parquet(rows: Iterator[dict[str, Any]]) -> bytes:
    pyarrow, parquet = arrow()
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for row in rows:
        for name in COLUMNS:
            columns[name].append(row[name])
    types = {name: pyarrow.int64() if name in _NUMBERS else pyarrow.string() for name in COLUMNS}
    types["leaf"] = pyarrow.binary()
    arrays = [pyarrow.array([_whole(name, value) for value in columns[name]], type=types[name]) for name in COLUMNS]
    out = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_arrays(arrays, names=list(COLUMNS)), out, compression="zstd")
    return out.getvalue()


def _whole(name: str, value: Any) -> Any:
    """Numbers of 2^53 and more are decimal strings in a leaf."""
    return int(value) if name in _NUMBERS and isinstance(value, str) else value


def _parquet_leaves(path: Path) -> Iterator[bytes]:
    pyarrow, parquet = arrow()
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(columns=["leaf"], batch_size=4096):
                yield from batch.column(0).to_pylist()
    except (pyarrow.ArrowException, KeyError, OSError) as problem:
        reason = str(problem).split("\n", 1)[0]
        raise ExportError(f"`{path.name}` is not a Parquet file of an export: {reason}", path=path) from None


_ENCODERS: dict[LeafFormat, Callable[[Iterator[dict[str, Any]]], bytes]] = {
    LeafFormat.CSV: _csv,
    LeafFormat.PARQUET: _parquet,
}
_READERS: dict[LeafFormat, Callable[[Path], Iterator[bytes]]] = {
    LeafFormat.NDJSON: _ndjson_leaves,
    LeafFormat.CSV: _csv_leaves,
    LeafFormat.PARQUET: _parquet_leaves,
}
