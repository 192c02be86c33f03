"""Readers of traces with block ids: Mooncake's, Qwen-Bailian's, kv-cache-tester's, and coding agents' deltas."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvcustody.errors import TraceError
from kvcustody.lab.replay.traces.block_numbers import SMALL_IDS, BlockNumbers, SessionGuesser
from kvcustody.lab.replay.traces.model import (
    MAX_REQUEST_TOKENS,
    BlockIds,
    Key,
    LineFields,
    TraceRequest,
    empty_blocks,
    trace_error,
)
from kvcustody.lab.replay.traces.rows import (
    STRICT,
    Head,
    SenderFields,
    TraceReading,
    TraceSender,
    checked_text,
    in_time_order,
    json_row,
    numbered_lines,
    read_rows,
)

DECODE_US = 20_000
"""How long an answer's token takes, where a trace says only when the next request follows the answer."""


class Mooncake:
    """Mooncake rows: milliseconds, lengths and 512-token block ids, the last partial block included.

    Rows as published carry no session; ours add `session`, `lineage` and `turn`. Both are read; without the
    fields the session is inferred from the chain of blocks (see `block_numbers`). A row with `delay` instead of a
    time is sent so many milliseconds after the answer to its session's row before.
    """

    block_tokens = 512
    blocks_fixed = True
    relative_sessions = False
    has_content = True
    assumptions: tuple[str, ...] = ()
    described = "JSON lines: timestamp (ms) or delay (ms), input_length, output_length, hash_ids of 512 tokens each"
    fix = "each line needs timestamp (ms) or delay (ms), input_length, output_length and hash_ids"

    def recognises(self, head: Head) -> bool:
        """Recognise the fields of the first line."""
        return {"input_length", "hash_ids"} <= head.row.keys() and "chat_id" not in head.row

    def read(self, path: Path, how: TraceReading = STRICT) -> Iterator[TraceRequest]:
        """Yield requests in time order; timestamps must not step back, unless rows have delays."""
        delayed = any(b'"delay"' in text for _, text in numbered_lines(path))
        rows = _MooncakeRows(self, path, how, in_order=not delayed)
        requests = read_rows(path, rows.row, how.refuse)
        yield from sorted(requests, key=lambda request: request.at_us) if delayed else requests


class _MooncakeRows:
    """One read of a Mooncake trace: the state between its rows."""

    def __init__(self, reader: Mooncake, path: Path, how: TraceReading, *, in_order: bool) -> None:
        self._reader, self._path, self._in_order = reader, path, in_order
        self._senders = SenderFields(how.columns)
        self._guesser = SessionGuesser()
        self._numbers = BlockNumbers(SMALL_IDS)
        self._last_us = 0
        self._answered_us: dict[Key, int] = {}

    def row(self, number: int, text: bytes) -> TraceRequest:
        fix, size = self._reader.fix, self._reader.block_tokens
        row = json_row(self._path, number, text, fix)
        tokens = row.integer("input_length", 1, MAX_REQUEST_TOKENS)
        count = -(-tokens // size)
        blocks = row.ids(
            "hash_ids", (count, count), f"input_length {tokens} / {size}, rounded up", self._numbers.of_ids
        )
        output = row.integer("output_length", 0, MAX_REQUEST_TOKENS)
        sender = self._senders.read(row)
        session: Key
        lineage: Key
        session, lineage, turn = self._guesser.place(number - 1, blocks, (sender.tenant, sender.subject))
        if sender.session is not None:
            session = sender.session
            lineage = row.key("lineage", session)
            turn = row.integer("turn") if "turn" in row else turn
        at_us = self._time_us(row, session)
        self._answered_us[session] = at_us + output * DECODE_US
        return TraceRequest(
            at_us, tokens, output, blocks, session, lineage, session, turn, 0, sender.tenant, sender.subject
        )

    def _time_us(self, row: LineFields, session: Key) -> int:
        if "timestamp" not in row and "delay" in row:
            return self._answered_us.get(session, 0) + row.milliseconds_us("delay")
        at_us = row.milliseconds_us("timestamp")
        if self._in_order and at_us < self._last_us:
            least = f"expected at least {self._last_us / 1000:g}: rows are in time order"
            raise row.error("timestamp", at_us / 1000, least)
        self._last_us = at_us
        return at_us


class Bailian:
    """Qwen-Bailian rows: seconds, lengths, 16-token block ids, and the chat that a request continues."""

    block_tokens = 16
    blocks_fixed = True
    relative_sessions = False
    has_content = True
    assumptions: tuple[str, ...] = ()
    described = "JSON lines: chat_id, parent_chat_id, timestamp (s), input_length, output_length, hash_ids of 16 tokens"
    fix = "each line needs chat_id, timestamp (s), input_length, output_length and hash_ids"

    def recognises(self, head: Head) -> bool:
        """Recognise the fields of the first line."""
        return {"chat_id", "hash_ids"} <= head.row.keys()

    def read(self, path: Path, how: TraceReading = STRICT) -> Iterator[TraceRequest]:
        """Yield requests in time order from the first one's time."""
        rows = _BailianRows(self, path, how)
        numbered = ((rows.line, request) for request in read_rows(path, rows.row, how.refuse))
        yield from in_time_order(path, numbered, how.refuse)


class _BailianRows:
    """One read of a Bailian trace: chats by their root."""

    def __init__(self, reader: Bailian, path: Path, how: TraceReading) -> None:
        self._reader, self._path = reader, path
        self._senders = SenderFields(how.columns)
        self._numbers = BlockNumbers(SMALL_IDS)
        self._root_of: dict[Key, Key] = {}
        self.line = 0

    def row(self, number: int, text: bytes) -> TraceRequest:
        self.line = number
        fix, size = self._reader.fix, self._reader.block_tokens
        row = json_row(self._path, number, text, fix)
        tokens = row.integer("input_length", 1, MAX_REQUEST_TOKENS)
        whole = tokens // size
        why = f"input_length {tokens} / {size}, with or without a partial block"
        blocks = row.ids("hash_ids", (whole, -(-tokens // size)), why, self._numbers.of_ids)
        output = row.integer("output_length", 0, MAX_REQUEST_TOKENS)
        row.raw("chat_id")
        chat, parent = row.key("chat_id", 0), row.key("parent_chat_id", -1)
        root = self._root_of[chat] = chat if parent == -1 else self._root_of.get(parent, parent)
        turn = row.integer("turn") if "turn" in row else 0
        sender = self._senders.read(row)
        session = root if sender.session is None else sender.session
        at_us = row.seconds_us("timestamp")
        return TraceRequest(
            at_us, tokens, output, blocks, session, session, session, turn, 0, sender.tenant, sender.subject
        )


class Agentic:
    """Coding-agent sessions, delta coded: a session line, then one line a request with `keep` and `new`
    ranges.

    Blocks are 64 tokens, full ones only. Times are relative to the session's start: `timeline.stagger` places
    sessions.
    """

    block_tokens = 64
    blocks_fixed = True
    relative_sessions = True
    has_content = True
    assumptions: tuple[str, ...] = (
        "Each session's start is drawn: the file has times from the start of a session only.",
    )
    described = "JSON lines: a session line, then t, in, out, st, keep and new, blocks of 64 tokens"
    fix = "see docs/reference/formats/traces.md: a session line, then lines with t, in, out, st, keep, new"

    def recognises(self, head: Head) -> bool:
        """Recognise a session line."""
        return "session" in head.row and not {"input_length", "hash_ids", "event"} & head.row.keys()

    def read(self, path: Path, how: TraceReading = STRICT) -> Iterator[TraceRequest]:
        """Yield requests in file order, with `at_us` from their session's start."""
        yield from read_rows(path, _AgenticRows(self, path, how).row, how.refuse)


class _AgenticRows:
    """One read of delta-coded sessions: the chains of the session at hand."""

    def __init__(self, reader: Agentic, path: Path, how: TraceReading) -> None:
        self._reader, self._path = reader, path
        self._senders = SenderFields(how.columns)
        self._header: LineFields | None = None
        self._sender = TraceSender()
        self._session: Key = ""
        self._chains: dict[int, BlockIds] = {}
        self._turn = 0

    def row(self, number: int, text: bytes) -> TraceRequest | None:
        fix, size = self._reader.fix, self._reader.block_tokens
        row = json_row(self._path, number, text, fix)
        if "session" in row:
            self._header, self._chains, self._turn = None, {}, 0
            stated = row.integer("block_size", 1) if "block_size" in row else size
            if stated != size:
                raise row.error("block_size", stated, f"expected {size}")
            self._sender = self._senders.read(row)
            self._session = row.key("session", "")
            self._header = row
            return None
        header = self._header
        if header is None:
            raise row.error("session", None, "a request before any session line")
        stream = row.integer("st", 0, 1 << 20)
        tokens = row.integer("in", 0, MAX_REQUEST_TOKENS)
        blocks = self._apply(row, self._chains.get(stream, empty_blocks()), tokens // size)
        at_us, output = row.seconds_us("t"), row.integer("out", 0, MAX_REQUEST_TOKENS)
        self._chains[stream] = blocks
        self._turn += 1
        return TraceRequest(
            at_us,
            tokens,
            output,
            blocks,
            self._session,
            header.key("fork_group", self._session),
            header.key("project_group", self._session),
            self._turn - 1,
            stream,
            self._sender.tenant,
            self._sender.subject,
        )

    @staticmethod
    def _apply(row: LineFields, previous: BlockIds, count: int) -> BlockIds:
        """Return the chain after one delta: the first `keep` blocks of `previous`, then every new range."""
        keep = row.integer("keep")
        if keep > len(previous):
            raise row.error("keep", keep, f"expected at most {len(previous)}, the stream's previous length")
        ranges = row.raw("new")
        if not isinstance(ranges, list) or not all(
            isinstance(r, list) and len(r) == 2 and all(type(n) is int and 0 <= n < SMALL_IDS for n in r)
            for r in ranges
        ):
            raise row.error("new", ranges, "expected a list of [first id, count]")
        total = keep + sum(n for _, n in ranges)
        if total != count:
            raise row.error("new", total, f"expected {count} blocks in all (`in` / 64, whole blocks)")
        parts = [previous[:keep], *(np.arange(a, a + n, dtype=np.int64) for a, n in ranges)]
        return np.concatenate(parts) if len(parts) > 1 else previous[:keep]


class KvCacheTester:
    """kv-cache-tester sessions as published: one JSON file a session (or a folder of them).

    Each request lists its whole chain in `hash_ids`; sub-agents nest their own `requests`, whose `t` counts from the
    sub-agent's own. Ids are global across files when `hash_id_scope` says so, else they are local to the file and
    kept apart here. Request entries that are repeated as a streaming and a non-streaming pair are read as two
    requests: the published file is not edited.
    """

    block_tokens = 64
    blocks_fixed = True
    relative_sessions = True
    has_content = True
    assumptions: tuple[str, ...] = Agentic.assumptions
    described = "a JSON file a session, or a folder of them: requests with t, in, out, hash_ids of 64 tokens each"
    fix = "expected a session object with `requests`, each with t, in, out and hash_ids"

    def recognises(self, head: Head) -> bool:
        """Recognise a folder, or an object that has requests."""
        text = head.text.lstrip()
        return head.folder or (text.startswith("{") and '"requests"' in text and "conversations" not in text[:4096])

    def read(self, path: Path, how: TraceReading = STRICT) -> Iterator[TraceRequest]:
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
        numbers, senders = BlockNumbers(SMALL_IDS), SenderFields(how.columns)
        for file in files:
            try:
                yield from self._session(file, senders, numbers, how)
            except TraceError as error:
                how.refuse(error)

    def _session(
        self, path: Path, senders: SenderFields, numbers: BlockNumbers, how: TraceReading
    ) -> Iterator[TraceRequest]:
        text = b"".join(checked_text(path, number, line) for number, line in numbered_lines(path))
        row = json_row(path, 1, text, self.fix)
        if "block_size" in row and row.integer("block_size") != self.block_tokens:
            raise row.error("block_size", row.raw("block_size"), f"expected {self.block_tokens}")
        sender = senders.read(row)
        session = row.key("id", path.name.split(".")[0]) if sender.session is None else sender.session
        scope = row.raw("hash_id_scope") if "hash_id_scope" in row else "local"
        streams = 0
        entries: list[tuple[int, int, LineFields]] = []
        queue: list[tuple[int, int, Any, str]] = [(0, 0, row.raw("requests"), "requests")]
        while queue:
            stream, start_us, requests, where = queue.pop()
            if not isinstance(requests, list):
                raise row.error(where, requests, "expected a list of requests")
            for number, request in enumerate(requests):
                entry = LineFields(path, 1, request, f"{self.fix} (at {where}[{number}])")
                try:
                    at_us = start_us + entry.seconds_us("t")
                except TraceError as error:
                    how.refuse(error)
                    continue
                if "requests" in entry:  # a sub-agent: its own stream, its own chain, its own clock
                    streams += 1
                    queue.append((streams, at_us, entry.raw("requests"), f"{where}[{number}].requests"))
                else:
                    entries.append((at_us, stream, entry))
        entries.sort(key=lambda item: item[:2])
        for turn, (at_us, stream, entry) in enumerate(entries):
            try:
                tokens = entry.integer("in", 0, MAX_REQUEST_TOKENS)
                count = tokens // self.block_tokens
                why = f"in {tokens} / 64, whole blocks or more"
                blocks = entry.ids("hash_ids", (count, MAX_REQUEST_TOKENS), why, numbers.of_ids)[:count]
                output = entry.integer("out", 0, MAX_REQUEST_TOKENS)
            except TraceError as error:
                how.refuse(error)
                continue
            if scope != "global":
                blocks = np.fromiter((numbers.number((path.name, block)) for block in blocks.tolist()), dtype=np.int64)
            yield TraceRequest(
                at_us, tokens, output, blocks, session, session, session, turn, stream, sender.tenant, sender.subject
            )
