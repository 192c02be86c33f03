"""Streaming readers of recorded traces, plain or gzip, one class per format.

1. A line that is not what its format says raises `TraceError` with file, line and field; nothing is skipped silently.
2. A reader holds one line, and per session what the delta coding needs; never the whole file (Azure rows are sorted).
3. Damage below the text (a cut gzip stream, bytes that are not UTF-8) is reported at the line where it was met.
"""

from __future__ import annotations

import datetime
import gzip
import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson

from kvcustody.errors import TraceError
from kvcustody.lab.replay.traces.model import (
    MAX_REQUEST_TOKENS,
    BlockIds,
    Key,
    LineFields,
    TraceRequest,
    empty_blocks,
    trace_error,
)


class Reader(Protocol):
    """One recorded format."""

    block_tokens: int
    partial_tail: bool
    relative_sessions: bool

    def read(self, path: Path) -> Iterator[TraceRequest]:
        """Yield requests in file order.

        Raises:
            TraceError: a line does not follow the format.
        """


@dataclass(frozen=True, slots=True)
class Trace:
    """A readable trace: where it comes from, its block size, and a fresh iterator over its requests on every
    call.
    """

    path: Path
    format: str
    block_tokens: int
    partial_tail: bool
    relative_sessions: bool = False

    def __iter__(self) -> Iterator[TraceRequest]:
        """Read the file from its start; raises `TraceError` at the first line that is not what the format
        says.
        """
        return READERS[self.format].read(self.path)


def open_trace(path: Path, format_name: str) -> Trace:
    """Name a trace file; raises `TraceError` when it cannot be opened or the format is unknown."""
    reader = READERS.get(format_name)
    if reader is None:
        known = ", ".join(sorted(READERS))
        raise TraceError(f"unknown trace format `{format_name}`; use one of {known}", format=format_name)
    if not path.is_dir():
        open_file(path).close()
    return Trace(path, format_name, reader.block_tokens, reader.partial_tail, reader.relative_sessions)


class Mooncake:
    """Mooncake rows: milliseconds, lengths and 512-token block ids, the last partial block included.

    Rows as published carry no session; ours add `session`, `lineage` and `turn`. Both are read; without the
    fields the session is inferred from the chain of blocks (see `sessions`).
    """

    block_tokens = 512
    partial_tail = True
    relative_sessions = False
    _fix = "each line needs timestamp (ms), input_length, output_length and hash_ids"

    def read(self, path: Path) -> Iterator[TraceRequest]:
        """Yield requests in file order; timestamps must not step back."""
        guesser = SessionGuesser()
        last_us = 0
        for number, text in numbered_lines(path):
            row = LineFields(path, number, decode_json(path, number, text, self._fix), self._fix)
            at_us = row.integer("timestamp") * 1000
            if at_us < last_us:
                raise row.error(
                    "timestamp", at_us // 1000, f"expected at least {last_us // 1000}: rows are in time order"
                )
            last_us = at_us
            tokens = row.integer("input_length", 1, MAX_REQUEST_TOKENS)
            blocks = row.ids("hash_ids", -(-tokens // self.block_tokens), f"input_length {tokens} / 512, rounded up")
            session: Key
            lineage: Key
            session, lineage, turn = guesser.place(number - 1, blocks)
            if "session" in row:
                session = row.key("session", session)
                lineage = row.key("lineage", session)
                turn = row.integer("turn") if "turn" in row else turn
            output = row.integer("output_length", 0, MAX_REQUEST_TOKENS)
            yield TraceRequest(at_us, tokens, output, blocks, session, lineage, session, turn)


class Agentic:
    """Coding-agent sessions, delta coded: a session line, then one line a request with `keep` and `new`
    ranges.

    Blocks are 64 tokens, full ones only. Times are relative to the session's start: `timeline.stagger` places
    sessions.
    """

    block_tokens = 64
    partial_tail = False
    relative_sessions = True
    _fix = "see docs/how-to/operate/replay-a-trace.md: a session line, then lines with t, in, out, st, keep, new"

    def read(self, path: Path) -> Iterator[TraceRequest]:
        """Yield requests in file order, with `at_us` from their session's start."""
        header: LineFields | None = None
        session: Key = ""
        chains: dict[int, BlockIds] = {}
        turn = 0
        for number, text in numbered_lines(path):
            row = LineFields(path, number, decode_json(path, number, text, self._fix), self._fix)
            if "session" in row:
                header, chains, turn = row, {}, 0
                session = row.key("session", "")
                size = row.integer("block_size", 1) if "block_size" in row else self.block_tokens
                if size != self.block_tokens:
                    raise row.error("block_size", size, f"expected {self.block_tokens}")
                continue
            if header is None:
                raise row.error("session", None, "a request before any session line")
            stream = row.integer("st", 0, 1 << 20)
            tokens = row.integer("in", 0, MAX_REQUEST_TOKENS)
            blocks = self._apply(row, chains.get(stream, empty_blocks()), tokens // self.block_tokens)
            chains[stream] = blocks
            yield TraceRequest(
                row.seconds_us("t"),
                tokens,
                row.integer("out", 0, MAX_REQUEST_TOKENS),
                blocks,
                session,
                header.key("fork_group", session),
                header.key("project_group", session),
                turn,
                stream,
            )
            turn += 1

    @staticmethod
    def _apply(row: LineFields, previous: BlockIds, count: int) -> BlockIds:
        """Return the chain after one delta: the first `keep` blocks of `previous`, then every new range."""
        keep = row.integer("keep")
        if keep > len(previous):
            raise row.error("keep", keep, f"expected at most {len(previous)}, the stream's previous length")
        ranges = row.raw("new")
        if not isinstance(ranges, list) or not all(
            isinstance(r, list) and len(r) == 2 and all(type(n) is int and 0 <= n < 1 << 62 for n in r) for r in ranges
        ):
            raise row.error("new", ranges, "expected a list of [first id, count]")
        total = keep + sum(n for _, n in ranges)
        if total != count:
            raise row.error("new", total, f"expected {count} blocks in all (`in` / 64, whole blocks)")
        parts = [previous[:keep], *(np.arange(a, a + n, dtype=np.int64) for a, n in ranges)]
        return np.concatenate(parts) if len(parts) > 1 else previous[:keep]


class KvCacheTester:
    """kv-cache-tester sessions as published: one JSON file a session (or a folder of them).

    Each request lists its whole chain in `hash_ids`; sub-agents nest their own `requests`. Ids are global
    across files when `hash_id_scope` says so, else they are local to the file and kept apart here. Request
    entries that are repeated as a streaming and a non-streaming pair are read as two requests: the published
    file is not edited.
    """

    block_tokens = 64
    partial_tail = False
    relative_sessions = True
    _fix = "expected a session object with `requests`, each with t, in, out and hash_ids"

    def read(self, path: Path) -> Iterator[TraceRequest]:
        """Yield the requests of every file, in the order of file names, with `at_us` from their session's start."""
        files = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not files:
            raise trace_error(
                path,
                0,
                "",
                "no *.json",
                expected="expected session files",
                fix="name a folder that holds traces/*.json",
            )
        for index, file in enumerate(files):
            yield from self._session(file, index)

    def _session(self, path: Path, index: int) -> Iterator[TraceRequest]:
        text = b"".join(line for _, line in numbered_lines(path))
        row = LineFields(path, 1, decode_json(path, 1, text, self._fix), self._fix)
        if "block_size" in row and row.integer("block_size") != self.block_tokens:
            raise row.error("block_size", row.raw("block_size"), f"expected {self.block_tokens}")
        session = row.key("id", path.name.split(".")[0])
        scope = row.raw("hash_id_scope") if "hash_id_scope" in row else "local"
        offset = 0 if scope == "global" else index << 40
        streams = 0
        entries: list[tuple[int, int, LineFields]] = []
        queue: list[tuple[int, Any, str]] = [(0, row.raw("requests"), "requests")]
        while queue:
            stream, requests, where = queue.pop()
            if not isinstance(requests, list):
                raise row.error(where, requests, "expected a list of requests")
            for number, request in enumerate(requests):
                entry = LineFields(path, 1, request, f"{self._fix} (at {where}[{number}])")
                if "requests" in entry:  # a sub-agent: its own stream, its own chain
                    streams += 1
                    queue.append((streams, entry.raw("requests"), f"{where}[{number}].requests"))
                    continue
                entries.append((entry.seconds_us("t"), stream, entry))
        entries.sort(key=lambda item: item[:2])
        for turn, (at_us, stream, entry) in enumerate(entries):
            tokens = entry.integer("in", 0, MAX_REQUEST_TOKENS)
            count = tokens // self.block_tokens
            blocks = entry.ids("hash_ids", len(entry.raw("hash_ids")), "")[:count] + offset
            if len(blocks) < count:
                raise entry.error("hash_ids", len(blocks), f"expected at least {count} block ids (in {tokens} / 64)")
            output = entry.integer("out", 0, MAX_REQUEST_TOKENS)
            yield TraceRequest(at_us, tokens, output, blocks, session, session, session, turn, stream)


class AzureLlm:
    """Azure LLM inference rows: a timestamp and two lengths. They publish no content, so every request is its own
    chain.
    """

    block_tokens = 16
    partial_tail = False
    relative_sessions = False
    _fix = "expected the columns TIMESTAMP,ContextTokens,GeneratedTokens"

    def read(self, path: Path) -> Iterator[TraceRequest]:
        """Yield requests in time order from the first one's time; their block ids are synthetic and never shared."""
        rows = sorted(self._rows(path))
        next_id = 0
        for number, (at_us, tokens, output) in enumerate(rows):
            count = tokens // self.block_tokens
            blocks = np.arange(next_id, next_id + count, dtype=np.int64)
            next_id += count
            yield TraceRequest(at_us - rows[0][0], tokens, output, blocks, number, number, number, 0)

    def _rows(self, path: Path) -> Iterator[tuple[int, int, int]]:
        header: list[str] | None = None
        for number, text in numbered_lines(path):
            cells = text.decode().strip().split(",")
            if header is None:
                header = cells
                if cells != ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]:
                    raise trace_error(path, number, "", ",".join(cells), expected="unexpected header", fix=self._fix)
                continue
            if len(cells) != 3:
                raise trace_error(
                    path, number, "", text.decode().strip(), expected="expected three cells", fix=self._fix
                )
            yield (
                self._time_us(path, number, cells[0]),
                self._length(path, number, header[1], cells[1]),
                self._length(path, number, header[2], cells[2]),
            )

    def _time_us(self, path: Path, number: int, cell: str) -> int:
        try:
            moment = datetime.datetime.fromisoformat(cell[:26])  # seven digits of a second are given; we keep six
        except ValueError:
            raise trace_error(
                path, number, "TIMESTAMP", cell, expected="expected YYYY-MM-DD HH:MM:SS.ffffff", fix=self._fix
            ) from None
        since = moment.replace(tzinfo=datetime.UTC) - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
        return since // datetime.timedelta(microseconds=1)

    def _length(self, path: Path, number: int, name: str, cell: str) -> int:
        if not cell.isascii() or not cell.isdigit() or int(cell) > MAX_REQUEST_TOKENS:
            raise trace_error(
                path,
                number,
                name,
                cell,
                expected=f"expected a whole number to {MAX_REQUEST_TOKENS}",
                fix=self._fix,
            )
        return int(cell)


READERS: dict[str, Reader] = {
    "mooncake": Mooncake(),
    "agentic": Agentic(),
    "kv-cache-tester": KvCacheTester(),
    "azure": AzureLlm(),
}


# Infers conversations from chains of block ids, for traces that publish none.
#
# Block ids are prefix-chained, so a shared id at depth d means d + 1 shared blocks. A request continues the session
# whose last request ended (in whole blocks) inside it. It belongs to the lineage that first wrote its deepest shared
# block. The first block does not count: a prefix in every request (a system prompt) is not a conversation.

_HEAD_BLOCKS = 1


class SessionGuesser:
    """Places each request, in trace order, into (session, lineage, turn); the names are row indices of first
    turns.
    """

    def __init__(self) -> None:
        self._turns: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._lineage_of_block: dict[int, int] = {}

    def place(self, row: int, blocks: BlockIds) -> tuple[int, int, int]:
        """Return the session, lineage and turn of the request in `row`, and remember its chain for later requests."""
        chain: list[int] = blocks[_HEAD_BLOCKS:].tolist()
        session = lineage = row
        for block in reversed(chain):
            if block in self._lineage_of_block:
                lineage = self._lineage_of_block[block]
                break
        for block in reversed(chain):
            if block in self._ends:
                session = self._ends[block]
                break
        for block in chain:
            self._lineage_of_block.setdefault(block, lineage)
        if len(chain) >= 2:  # the last block may be partial, and then is never met again
            self._ends[chain[-2]] = session
        if chain:
            self._ends[chain[-1]] = session
        turn = self._turns.get(session, 0)
        self._turns[session] = turn + 1
        return session, lineage, turn


# The lines of a trace file, plain or gzip, with their numbers; every damage is a `TraceError`.

_GZIP_MAGIC = b"\x1f\x8b"


def open_file(path: Path) -> io.BufferedIOBase:
    """Return the decompressed bytes of a trace; raises `TraceError` when it cannot be opened."""
    try:
        with path.open("rb") as raw:
            packed = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        return gzip.open(path, "rb") if packed else path.open("rb")
    except OSError as error:
        raise TraceError(
            f"cannot read trace `{path}`: {error.strerror or error}; check the path and its permissions",
            path=str(path),
            line=0,
        ) from None


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield non-blank lines with their numbers; a damaged stream is an error after the last whole line."""
    number = 0
    with open_file(path) as stream:
        try:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    try:
                        line.decode()
                    except UnicodeDecodeError:
                        fix = "restore the file from its source"
                        raise trace_error(path, number, "", line, expected="expected UTF-8 text", fix=fix) from None
                    yield number, line
        except (OSError, EOFError, zlib.error) as error:
            fix = "the file is cut or damaged: fetch it again; the lines before were replayed"
            raise trace_error(path, number + 1, "", str(error), expected="the stream breaks here", fix=fix) from None
    if number == 0:
        raise trace_error(path, 1, "", "", expected="an empty file", fix="name a trace that holds requests")


def decode_json(path: Path, number: int, text: bytes, fix: str) -> object:
    """Decode one JSON value."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise trace_error(
            path, number, "", text.decode()[:80].strip(), expected=f"not JSON ({error.msg})", fix=fix
        ) from None
