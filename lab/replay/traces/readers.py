"""All formats of recorded traces, plain or gzip: which one a file has, and its requests.

A reader holds one row, and what later rows refer to; never the whole file, but for logs and rows with delays, which
are put in order first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvcustody.errors import TraceError
from kvcustody.lab.replay.traces.hashed_traces import Agentic, Bailian, KvCacheTester, Mooncake
from kvcustody.lab.replay.traces.length_traces import AzureLlm, BurstGpt
from kvcustody.lab.replay.traces.model import TraceRequest
from kvcustody.lab.replay.traces.rows import Reader, TraceReading, open_file, read_head
from kvcustody.lab.replay.traces.text_traces import SglangLog, ShareGpt, VllmLog
from kvcustody.plurals import several

READERS: dict[str, Reader] = {
    "mooncake": Mooncake(),
    "bailian": Bailian(),
    "agentic": Agentic(),
    "kv-cache-tester": KvCacheTester(),
    "azure": AzureLlm(),
    "burstgpt": BurstGpt(),
    "sharegpt": ShareGpt(),
    "vllm-log": VllmLog(),
    "sglang-log": SglangLog(),
}
"""Readers by format, in the order in which a file is tried."""

_SHOWN_MAX = 10


@dataclass(frozen=True, slots=True)
class Trace:
    """A readable trace: where it comes from, its block size, and a fresh iterator over its requests on every
    call.

    Args:
        columns: the field that holds the tenant, session or subject, where it has another name.
        skip_wrong_rows: whether wrong rows are left out; otherwise the first one is an error.
    """

    path: Path
    format: str
    block_tokens: int
    columns: Mapping[str, str] = field(default_factory=dict)
    skip_wrong_rows: bool = False

    @property
    def reader(self) -> Reader:
        """The reader of its format."""
        return READERS[self.format]

    @property
    def relative_sessions(self) -> bool:
        """Whether times count from the start of each session."""
        return self.reader.relative_sessions

    def __iter__(self) -> Iterator[TraceRequest]:
        """Read the file from its start; raises `TraceError` at the first line that is not what the format
        says, unless wrong rows are skipped.
        """
        if self.skip_wrong_rows:
            return self.noting(WrongRows())
        return self.reader.read(self.path, TraceReading(self.columns, block_tokens=self.block_tokens))

    def noting(self, wrong: WrongRows) -> Iterator[TraceRequest]:
        """Read the file from its start; wrong rows go to `wrong`, and the reading goes on."""
        return self.reader.read(self.path, TraceReading(self.columns, wrong.add, self.block_tokens))


class WrongRows:
    """Wrong rows: how many there are, and the errors of the first ten."""

    def __init__(self) -> None:
        self.count = 0
        self.first: list[TraceError] = []

    def add(self, error: TraceError) -> None:
        """Take note of one."""
        self.count += 1
        if len(self.first) < _SHOWN_MAX:
            self.first.append(error)

    def check(self) -> None:
        """Raise one `TraceError` about all of them, where there are any."""
        if not self.count:
            return
        first, *others = self.first
        if not others:
            raise TraceError(f"{first.message}; or leave it out with --skip-wrong-rows", **first.operands)
        lines = [error.message for error in self.first]
        more = f"\n  and {several(self.count - len(lines), 'more wrong row')}" if self.count > len(lines) else ""
        raise TraceError(
            f"{several(self.count, 'row')} of the trace are wrong; correct them, or leave them out with "
            f"--skip-wrong-rows:\n  " + "\n  ".join(lines) + more,
            **{**first.operands, "wrong_rows": self.count},
        )


def recognise(path: Path) -> str:
    """Return the format that a trace has, by its content.

    Raises:
        TraceError: it cannot be read, or has none of the formats.
    """
    head = read_head(path)
    if not head.folder and not head.lines:
        raise TraceError(f"{path}:1: the file is empty; name a trace that holds requests", path=str(path), line=1)
    for name, reader in READERS.items():
        if reader.recognises(head):
            return name
    known = "\n  ".join(f"{name}: {reader.described}" for name, reader in READERS.items())
    shown = head.lines[0][:80] if head.lines else ""
    raise TraceError(
        f"{path}:1: no known trace begins with `{shown}`; convert it to one of these, or name its format with "
        f"--trace-format:\n  {known}\ndocs/how-to/replay-your-own-trace.md shows how to write records of your own",
        path=str(path),
        line=1,
    )


def open_trace(
    path: Path,
    format_name: str | None = None,
    *,
    columns: Mapping[str, str] | None = None,
    block_tokens: int | None = None,
    skip_wrong_rows: bool = False,
) -> Trace:
    """Name a trace file, whose format is recognised unless it is given.

    Raises:
        TraceError: it cannot be opened, or its format is unknown.
    """
    name = format_name or recognise(path)
    reader = READERS.get(name)
    if reader is None:
        known = ", ".join(sorted(READERS))
        raise TraceError(f"unknown trace format `{name}`; use one of {known}", format=name)
    if not path.is_dir():
        open_file(path).close()
    size = reader.block_tokens if reader.blocks_fixed else block_tokens or reader.block_tokens
    return Trace(path, name, size, columns or {}, skip_wrong_rows)
