"""Reading a trace row by row: its lines, the sender that a row names, and what becomes of a wrong row.

1. A wrong row is refused by file, line, field, value and remedy. `TraceReading.refuse` decides what follows: it raises,
   or it takes note and the reader goes on with the next row.
2. A tenant, session or subject is in every row or in none: a row that differs from the first one is wrong.
3. Damage below the text (a cut gzip stream) ends the reading whatever `refuse` does: no row follows it.
"""

from __future__ import annotations

import gzip
import heapq
import io
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import orjson

from kvcustody.errors import IdentityError, TraceError
from kvcustody.governance.identity.principal import check_identifier
from kvcustody.lab.replay.traces.model import Key, LineFields, TraceRequest, trace_error
from kvcustody.plurals import several

SENDER_ROLES: Final = ("tenant", "session", "subject")
ROWS_OUT_OF_ORDER_MAX: Final = 10_000
_GZIP_MAGIC = b"\x1f\x8b"


def raise_error(error: TraceError) -> None:
    """Raise the error: nothing after a wrong row is read."""
    raise error


@dataclass(frozen=True, slots=True)
class TraceReading:
    """How to read a trace.

    Args:
        columns: the field that holds the tenant, session or subject, where it has another name.
        refuse: called with the error of each wrong row.
        block_tokens: tokens of a block, for traces that publish no blocks; None: the reader's own.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    refuse: Callable[[TraceError], None] = raise_error
    block_tokens: int | None = None


STRICT: Final = TraceReading()


class Reader(Protocol):
    """One recorded format.

    `blocks_fixed`: its block ids stand for blocks of `block_tokens` tokens; otherwise blocks may have any size.
    `has_content`: equal prompts can be recognised. `assumptions`: what the file does not say, and what is taken for it.
    """

    block_tokens: int
    blocks_fixed: bool
    relative_sessions: bool
    has_content: bool
    assumptions: tuple[str, ...]
    described: str

    def recognises(self, head: Head) -> bool:
        """Return whether a file that begins so has this format."""

    def read(self, path: Path, how: TraceReading = STRICT) -> Iterator[TraceRequest]:
        """Yield requests, in time order unless sessions are relative.

        Raises:
            TraceError: a row does not follow the format, and `how.refuse` raises it.
        """


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a file: its text, its lines, and the first two lines as JSON objects where they are such."""

    folder: bool
    text: str
    lines: tuple[str, ...]
    rows: tuple[Mapping[str, object], ...]

    @property
    def row(self) -> Mapping[str, object]:
        """The first line's JSON object; empty where it is none."""
        return self.rows[0] if self.rows else {}


_HEAD_BYTES = 1 << 18


def read_head(path: Path) -> Head:
    """Read the beginning of a trace; raises `TraceError` where it cannot be read."""
    if path.is_dir():
        return Head(True, "", (), ())
    with open_file(path) as stream:
        try:
            text = stream.read(_HEAD_BYTES).decode(errors="replace").removeprefix("\ufeff")
        except (OSError, EOFError, zlib.error) as error:
            fix = "the file is cut or damaged: fetch it again"
            raise trace_error(path, 1, "", str(error), expected="the stream breaks here", fix=fix) from None
    lines = tuple(line for line in text.splitlines() if line.strip())
    rows = []
    for line in lines[:2]:
        try:
            decoded = orjson.loads(line)
        except orjson.JSONDecodeError:
            break
        if isinstance(decoded, dict):
            rows.append(decoded)
    return Head(False, text, lines, tuple(rows))


class TraceSender(NamedTuple):
    """What a row says of its sender."""

    tenant: str | None = None
    session: Key | None = None
    subject: str | None = None


class SenderFields:
    """Finds tenant, session and subject in the rows of one trace (rule 2)."""

    def __init__(self, columns: Mapping[str, str]) -> None:
        self._named = dict(columns)
        self._given: dict[str, bool] | None = None
        self._fields: dict[tuple[str, ...], dict[str, str]] = {}

    def read(self, row: LineFields) -> TraceSender:
        """Return the sender that a row names; raises `TraceError` where it is malformed or missing."""
        fields = self._fields_of(row)
        stated: dict[str, Key] = {}
        for role, name in fields.items():
            if name not in row:
                raise row.error(name, None, f"missing field (--column {role}={name}; it has {', '.join(row.names)})")
            value = row.key(name, "")
            if role != "session":
                value = self._checked(row, role, name, str(value))
            stated[role] = value
        given = {role: role in fields for role in SENDER_ROLES}
        if self._given is None:
            self._given = given
        for role in SENDER_ROLES:
            if given[role] != self._given[role]:
                name = fields.get(role, role)
                expected = (
                    f"rows before this one have {'a' if self._given[role] else 'no'} {role}, and this one differs"
                )
                raise row.error(name, stated.get(role), expected)
        return TraceSender(stated.get("tenant"), stated.get("session"), stated.get("subject"))  # type: ignore[arg-type]

    def _fields_of(self, row: LineFields) -> dict[str, str]:
        names = tuple(row.names)
        fields = self._fields.get(names)
        if fields is None:
            by_role = {name.lower().replace("_", "").replace(" ", ""): name for name in reversed(names)}
            fields = {
                role: self._named.get(role) or by_role.get(role) or by_role[f"{role}id"]
                for role in SENDER_ROLES
                if role in self._named or role in by_role or f"{role}id" in by_role
            }
            self._fields[names] = fields
        return fields

    @staticmethod
    def _checked(row: LineFields, role: str, name: str, value: str) -> str:
        try:
            return check_identifier(role, value)
        except IdentityError as error:
            raise row.error(name, value, error.message) from None


def read_rows(
    path: Path, row_of: Callable[[int, bytes], TraceRequest | None], refuse: Callable[[TraceError], None]
) -> Iterator[TraceRequest]:
    """Yield the request of each line; `row_of` returns None for a line that holds none."""
    for number, text in numbered_lines(path):
        try:
            request = row_of(number, checked_text(path, number, text))
        except TraceError as error:
            refuse(error)
            continue
        if request is not None:
            yield request


def in_time_order(
    path: Path, requests: Iterable[tuple[int, TraceRequest]], refuse: Callable[[TraceError], None]
) -> Iterator[TraceRequest]:
    """Yield requests in time order from the first one's time. They come with their lines' numbers, nearly in order."""
    waiting: list[tuple[int, int, TraceRequest]] = []
    first_us: int | None = None
    last_us = 0
    for number, request in requests:
        if first_us is not None and request.at_us < last_us:
            fix = f"sort the file by time: a row may come at most {several(ROWS_OUT_OF_ORDER_MAX, 'row')} late"
            late = (last_us - request.at_us) / 1e6
            refuse(
                trace_error(path, number, "", f"{late:g} s too late", expected="expected rows in time order", fix=fix)
            )
            continue
        heapq.heappush(waiting, (request.at_us, number, request))
        if len(waiting) > ROWS_OUT_OF_ORDER_MAX:
            last_us, _, earliest = heapq.heappop(waiting)
            first_us = last_us if first_us is None else first_us
            yield replace(earliest, at_us=last_us - first_us)
    while waiting:
        at_us, _, earliest = heapq.heappop(waiting)
        first_us = at_us if first_us is None else first_us
        yield replace(earliest, at_us=at_us - first_us)


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
                    yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        except (OSError, EOFError, zlib.error) as error:
            fix = "the file is cut or damaged: fetch it again"
            raise trace_error(path, number + 1, "", str(error), expected="the stream breaks here", fix=fix) from None
    if number == 0:
        raise trace_error(path, 1, "", "", expected="an empty file", fix="name a trace that holds requests")


def checked_text(path: Path, number: int, line: bytes) -> bytes:
    """Return a line that is UTF-8; raises `TraceError` for another."""
    try:
        line.decode()
    except UnicodeDecodeError:
        fix = "restore the file from its source"
        raise trace_error(path, number, "", line, expected="expected UTF-8 text", fix=fix) from None
    return line


def json_row(path: Path, number: int, text: bytes, fix: str) -> LineFields:
    """Decode a line that is one JSON object; raises `TraceError` for any other."""
    try:
        return LineFields(path, number, orjson.loads(text), fix)
    except orjson.JSONDecodeError as error:
        raise trace_error(
            path, number, "", text.decode()[:80].strip(), expected=f"not JSON ({error.msg})", fix=fix
        ) from None
