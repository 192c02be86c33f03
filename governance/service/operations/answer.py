"""Answers of operations: from their functions, behind the gate, stored, and compared."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import orjson

from kvcustody.governance.service.problem_details import MEDIA_TYPE, ProblemError

Headers = list[tuple[bytes, bytes]]


class Answer(NamedTuple):
    """A complete answer."""

    status: int
    headers: Headers
    body: bytes

    def header(self, name: str) -> str:
        """Return the first header of a name; empty without one."""
        wanted = name.lower().encode()
        return next((value.decode("latin-1") for key, value in self.headers if key.lower() == wanted), "")

    def packed(self) -> bytes:
        """Return the answer as bytes to store; `unpacked` reads them."""
        head = [
            self.status,
            [[name.decode("latin-1"), value.decode("latin-1")] for name, value in self.headers],
        ]
        text = orjson.dumps(head)
        return len(text).to_bytes(4, "little") + text + self.body

    def without_length(self) -> Answer:
        """Return the answer without its length, which its sender states again."""
        return self._replace(headers=[pair for pair in self.headers if pair[0].lower() != b"content-length"])


def unpacked(data: bytes) -> Answer:
    """Return a stored answer, without its length."""
    end = 4 + int.from_bytes(data[:4], "little")
    status, headers = orjson.loads(data[4:end])
    pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    return Answer(status, pairs, data[end:]).without_length()


def problem_answer(problem: ProblemError) -> Answer:
    """Return a problem as an answer."""
    extra = [(name.lower().encode(), value.encode("latin-1")) for name, value in problem.headers.items()]
    return Answer(problem.type.status, [(b"content-type", MEDIA_TYPE.encode()), *extra], problem.body())


def etag_of(body: bytes) -> str:
    """Return the `ETag` of an answer's content, for an operation that sets none."""
    return f'"{hashlib.blake2b(body, digest_size=16).hexdigest()}"'


class Content(NamedTuple):
    """The answer of an operation that made the bytes itself."""

    body: bytes = b""
    media: str | None = "application/json"
    status: int = 200
    headers: Mapping[str, str] = MappingProxyType({})

    def answer(self) -> Answer:
        """Return the answer behind the gate; a text without an encoding is UTF-8."""
        headers = dict(self.headers)
        if self.media is not None:
            unsaid = self.media.startswith("text/") and "charset=" not in self.media
            headers["content-type"] = f"{self.media}; charset=utf-8" if unsaid else self.media
        pairs = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
        return Answer(self.status, pairs, self.body)


class FileContent(NamedTuple):
    """The answer of an operation that returns a file."""

    path: Path
    media: str
    headers: Mapping[str, str]

    def answer(self) -> Answer:
        """Return the file in one piece."""
        return Content(self.path.read_bytes(), self.media, headers=self.headers).answer()
