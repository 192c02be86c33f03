"""Lines of a trace file, plain or gzip, with their numbers; every damage is a `TraceError`."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path

import orjson

from kvcustody.errors import TraceError
from kvcustody.lab.replay.traces.model import trace_error

_GZIP_MAGIC = b"\x1f\x8b"


def open_file(path: Path) -> io.BufferedIOBase:
    """The decompressed bytes of a trace; raises `TraceError` when it cannot be opened."""
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
    """Non-blank lines, numbered; a damaged stream is an error at the line after the last whole one."""
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
    """One JSON value."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise trace_error(
            path, number, "", text.decode()[:80].strip(), expected=f"not JSON ({error.msg})", fix=fix
        ) from None
