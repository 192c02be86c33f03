"""What an operation answers: as its function makes it, as it leaves the gate, and how one is kept and told apart."""

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
    """A whole answer."""

    status: int
    headers: Headers
    body: bytes

    def header(self, name: str) -> str:
        """The first header of a name; empty where there is none."""
        wanted = name.lower().encode()
        return next((value.decode("latin-1") for key, value in self.headers if key.lower() == wanted), "")

    def packed(self) -> bytes:
        """The answer as bytes to be kept; `unpacked` reads them."""
        head = [
            self.status,
            [[name.decode("latin-1"), value.decode("latin-1")] for name, value in self.headers],
        ]
        text = orjson.dumps(head)
        return len(text).to_bytes(4, "little") + text + self.body

    def without_length(self) -> Answer:
        """The answer without the length that whoever sends it states anew."""
        return self._replace(headers=[pair for pair in self.headers if pair[0].lower() != b"content-length"])


def unpacked(data: bytes) -> Answer:
    """A kept answer, without its length."""
    end = 4 + int.from_bytes(data[:4], "little")
    status, headers = orjson.loads(data[4:end])
    pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    return Answer(status, pairs, data[end:]).without_length()


def problem_answer(problem: ProblemError) -> Answer:
    """A problem as an answer."""
    extra = [(name.lower().encode(), value.encode("latin-1")) for name, value in problem.headers.items()]
    return Answer(problem.type.status, [(b"content-type", MEDIA_TYPE.encode()), *extra], problem.body())


def etag_of(body: bytes) -> str:
    """What tells the content of an answer from another: of an operation that gives no `ETag` of its own."""
    return f'"{hashlib.blake2b(body, digest_size=16).hexdigest()}"'


class Content(NamedTuple):
    """What an operation answers whose bytes it made itself."""

    body: bytes = b""
    media: str | None = "application/json"
    status: int = 200
    headers: Mapping[str, str] = MappingProxyType({})

    def answer(self) -> Answer:
        """As it leaves the gate; a text of no stated encoding is UTF-8."""
        headers = dict(self.headers)
        if self.media is not None:
            unsaid = self.media.startswith("text/") and "charset=" not in self.media
            headers["content-type"] = f"{self.media}; charset=utf-8" if unsaid else self.media
        pairs = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
        return Answer(self.status, pairs, self.body)


class FileContent(NamedTuple):
    """What an operation answers that hands out a file."""

    path: Path
    media: str
    headers: Mapping[str, str]

    def answer(self) -> Answer:
        """The file in one piece."""
        return Content(self.path.read_bytes(), self.media, headers=self.headers).answer()
