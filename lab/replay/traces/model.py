"""One request of a workload, whatever its file or generator.

1. `blocks` are prefix-chained ids of `block_tokens` tokens each: equal ids mean equal content and equal prefix.
2. Requests of one trace come in order of `at_us`.
3. A published trace names no tenant: who sent a request is drawn by `labels`, so one trace serves any population. An
   own trace may name `tenant`, `session` and `subject`; then nothing of these is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcustody.errors import TraceError

Key = int | str
BlockIds = NDArray[np.int64]

MAX_REQUEST_TOKENS = 1 << 24
"""A request longer than this is a damaged line, not a workload; it also bounds what one line can make us
allocate.
"""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request as its trace describes it; `blocks` may end with a partial one (see `readers.Trace.partial_tail`)."""

    at_us: int
    input_tokens: int
    output_tokens: int
    blocks: BlockIds
    session: Key
    lineage: Key
    project: Key
    turn: int
    stream: int = 0
    tenant: str | None = None
    subject: str | None = None


def trace_error(path: Path, line: int, field: str, value: object, *, expected: str, fix: str) -> TraceError:
    """Return the error for a rejected line: place, field, value found if there is one, value expected, and the fix."""
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    place = f"{path}:{line}:" + (f" field `{field}`:" if field else "")
    got = "" if value is None else f", got `{shown}`"
    return TraceError(
        f"{place} {expected}{got}; {fix}",
        path=str(path),
        line=line,
        field=field,
        value=value,
        fix=fix,
    )


def empty_blocks() -> BlockIds:
    """Return an empty array of blocks; requests shorter than one block share it."""
    return np.empty(0, dtype=np.int64)


class LineFields:
    """Typed access to one decoded line: every getter names the field and the value in its error.

    `text`: the values are cells of a CSV, so numbers are read from text.
    """

    __slots__ = ("_line", "_path", "_row", "_text", "fix")

    def __init__(self, path: Path, line: int, row: object, fix: str, *, text: bool = False) -> None:
        self._path, self._line, self._text, self.fix = path, line, text, fix
        if not isinstance(row, dict):
            raise trace_error(path, line, "", row, expected="expected a JSON object", fix=fix)
        self._row: dict[str, Any] = row

    def __contains__(self, name: str) -> bool:
        return name in self._row

    @property
    def names(self) -> list[str]:
        """The names of this line's fields, in its order."""
        return list(self._row)

    def error(self, name: str, value: object, expected: str) -> TraceError:
        """Return a `TraceError` about this line."""
        return trace_error(self._path, self._line, name, value, expected=expected, fix=self.fix)

    def raw(self, name: str) -> Any:
        """Return the field as decoded; missing is an error."""
        if name not in self._row:
            raise self.error(name, None, "missing field")
        return self._row[name]

    def integer(self, name: str, low: int = 0, high: int = 1 << 53) -> int:
        """Return a whole number in [low, high]; booleans and floats are not numbers here."""
        value = self._number(name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(name, value, f"expected a whole number from {low} to {high}")
        return value

    def seconds_us(self, name: str) -> int:
        """Return a time in seconds (whole or fractional), as whole microseconds."""
        return round(self._time(name, "seconds", 1e10) * 1_000_000)

    def milliseconds_us(self, name: str) -> int:
        """Return a time in milliseconds (whole or fractional), as whole microseconds."""
        return round(self._time(name, "milliseconds", 1e13) * 1_000)

    def _time(self, name: str, unit: str, below: float) -> float:
        value = self._number(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < below:
            raise self.error(name, value, f"expected {unit} from 0 to {below:g}")
        return value

    def _number(self, name: str) -> Any:
        """Return a field's value; a cell's text as a number where it is one."""
        value = self.raw(name)
        if self._text and isinstance(value, str):
            for kind in (int, float):
                with suppress(ValueError):
                    return kind(value)
        return value

    def key(self, name: str, default: Key) -> Key:
        """Return a session-like key: a non-empty string or a whole number."""
        value = self._row.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
            raise self.error(name, value, "expected a name or a whole number")
        return value

    def ids(
        self, name: str, counts: tuple[int, int], why: str, numbered: Callable[[list[int | str]], BlockIds]
    ) -> BlockIds:
        """Return block ids, each a whole number from 0 on or a text.

        Args:
            counts: the least and the most ids that there may be.
            why: where these counts come from.
            numbered: makes them block ids (`BlockNumbers.of_ids`).
        """
        value = self.raw(name)
        if not isinstance(value, list):
            raise self.error(name, value, "expected a list of block ids")
        least, most = counts
        if not least <= len(value) <= most:
            expected = f"{least}" if least == most else f"{least} or more" if most > least + 1 else f"{least} or {most}"
            raise self.error(name, len(value), f"expected {expected} block ids ({why})")
        wrong = [item for item in value if type(item) is not str and (type(item) is not int or item < 0)]
        if wrong:
            raise self.error(name, wrong[0], "expected whole block ids from 0, or texts")
        return numbered(value) if value else empty_blocks()
