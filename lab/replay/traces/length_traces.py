"""Readers of CSV traces that publish arrival times and lengths, and no content: Azure's and BurstGPT's.

Every request is a chain of its own, because nothing says that two prompts are alike.
"""

from __future__ import annotations

import csv
import datetime
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from kvcustody.lab.replay.traces.model import MAX_REQUEST_TOKENS, LineFields, TraceRequest, trace_error
from kvcustody.lab.replay.traces.rows import STRICT, Head, SenderFields, TraceReading, in_time_order, read_rows

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
NO_CONTENT = "The file has lengths and no content, so no prompt repeats another and nothing can be found."


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in next(csv.reader([line], skipinitialspace=True), [])]


class _LengthRows:
    """One read of a CSV of lengths: the state between its rows."""

    def __init__(
        self, reader: _LengthTrace, path: Path, how: TraceReading, time_us: Callable[[LineFields, str], int]
    ) -> None:
        self._reader, self._path, self._time_us = reader, path, time_us
        self._size = how.block_tokens or reader.block_tokens
        self._senders = SenderFields(how.columns)
        self._header: list[str] | None = None
        self._next_block = 0
        self._has_fields = True
        self.line = 0

    def row(self, number: int, text: bytes) -> TraceRequest | None:
        self.line = number
        cells, fix = _cells(text.decode()), self._reader.fix
        if self._header is None:
            self._header = cells
            missing = [name for name in self._reader.columns if name not in cells]
            if missing:
                self._has_fields = False  # one error for all rows
                fields = f"expected a header with {', '.join(self._reader.columns)}"
                raise trace_error(self._path, number, missing[0], ",".join(cells), expected=fields, fix=fix)
            return None
        if not self._has_fields:
            return None
        if len(cells) != len(self._header):
            expected = f"expected {len(self._header)} cells, as the header has"
            raise trace_error(self._path, number, "", text.decode().strip(), expected=expected, fix=fix)
        row = LineFields(self._path, number, dict(zip(self._header, cells, strict=True)), fix, text=True)
        time, prompt, answer = self._reader.columns
        at_us = self._time_us(row, time)
        tokens = row.integer(prompt, 0, MAX_REQUEST_TOKENS)
        output = row.integer(answer, 0, MAX_REQUEST_TOKENS)
        sender = self._senders.read(row)
        count = tokens // self._size
        blocks = np.arange(self._next_block, self._next_block + count, dtype=np.int64)
        self._next_block += count
        session = number if sender.session is None else sender.session
        return TraceRequest(
            at_us, tokens, output, blocks, session, session, session, 0, tenant=sender.tenant, subject=sender.subject
        )


class _LengthTrace:
    """What readers of lengths have in common."""

    block_tokens = 16
    blocks_fixed = False
    relative_sessions = False
    has_content = False
    assumptions: tuple[str, ...] = (NO_CONTENT,)
    described: str
    columns: tuple[str, str, str]
    fix: str

    def recognises(self, head: Head) -> bool:
        """Recognise the header."""
        return bool(head.lines) and set(self.columns) <= set(_cells(head.lines[0]))

    def read(self, path: Path, how: TraceReading = STRICT) -> Iterator[TraceRequest]:
        """Yield requests in time order from the first one's time; their block ids are synthetic and never shared."""
        rows = _LengthRows(self, path, how, self.time_us)
        numbered = ((rows.line, request) for request in read_rows(path, rows.row, how.refuse))
        yield from in_time_order(path, numbered, how.refuse)

    def time_us(self, row: LineFields, name: str) -> int:
        """Return the time of a row in microseconds."""
        raise NotImplementedError


class AzureLlm(_LengthTrace):
    """Azure LLM inference rows of 2023 and 2024: a timestamp, which may have an offset, and two lengths."""

    described = "CSV: TIMESTAMP (ISO, with or without an offset), ContextTokens, GeneratedTokens"
    columns = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    fix = "expected the columns TIMESTAMP,ContextTokens,GeneratedTokens"

    def time_us(self, row: LineFields, name: str) -> int:
        """Return a moment; one without an offset is UTC."""
        cell = row.raw(name)
        try:
            moment = datetime.datetime.fromisoformat(cell)
        except ValueError:
            raise row.error(name, cell, "expected YYYY-MM-DD HH:MM:SS.ffffff, with or without an offset") from None
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=datetime.UTC)
        return (moment - _EPOCH) // datetime.timedelta(microseconds=1)


class BurstGpt(_LengthTrace):
    """BurstGPT rows: seconds, and the tokens of request and response; the third release adds sessions."""

    described = "CSV: Timestamp (s), Request tokens, Response tokens, and in its third release Session ID"
    columns = ("Timestamp", "Request tokens", "Response tokens")
    fix = "expected the columns Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"

    def time_us(self, row: LineFields, name: str) -> int:
        """Return seconds since the file's own beginning."""
        return row.seconds_us(name)
