"""Templates, always escaped, with one format for numbers and times.

1. Every text is escaped where it is written; no template marks a value as safe.
2. Static files carry the digest of their content in their address, so that they may be kept for a year.
3. The schema of policies is one of them, made of the declarations by which policies are read: editors complete from it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from kvcustody.console.render import number_format as words
from kvcustody.governance.observability.serving_summary import seconds_text, share_text
from kvcustody.policies.workbench.json_schema import schema as policy_schema
from kvcustody.times import iso

_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml", "json": "application/json"}


class StaticFile(NamedTuple):
    """A file that pages load."""

    content: bytes
    media_type: str
    version: str


def _static_file(name: str, content: bytes) -> StaticFile:
    media_type = _TYPES[name.rpartition(".")[2]]
    return StaticFile(content, f"{media_type}; charset=utf-8", hashlib.sha256(content).hexdigest()[:12])


def _static_files() -> dict[str, StaticFile]:
    static_files = {"policy-schema.json": json.dumps(policy_schema()).encode()}
    kept = {
        item.name: item.read_bytes()
        for item in files("kvcustody.console.web").joinpath("static").iterdir()
        if item.name.rpartition(".")[2] in _TYPES
    }
    return {name: _static_file(name, content) for name, content in (static_files | kept).items()}


STATIC_FILES = _static_files()


def _static(name: str) -> str:
    return f"/console/static/{name}?v={STATIC_FILES[name].version}"


def _sparkline(values: Sequence[float | None]) -> list[str]:
    """Return the points of lines in a box of 100 by 24: one for each stretch that has data."""
    most = max((value for value in values if value is not None), default=0) or 1
    step = 100 / max(1, len(values) - 1)
    lines: list[list[str]] = [[]]
    for place, value in enumerate(values):
        if value is None:
            lines.append([])
        else:
            lines[-1].append(f"{place * step:.1f},{22 - 20 * value / most:.1f}")
    return [" ".join(line) for line in lines if line]


def _minute(at_us: int | None) -> str:
    return words.minute(at_us)[:16].replace("T", " ") + " UTC" if at_us else "–"


def _clock(at_us: int | None) -> str:
    """Return a moment for a column whose heading says that it is UTC."""
    return _second(at_us).removesuffix(" UTC")


def _second(at_us: int | None) -> str:
    return words.moment(at_us)[:19].replace("T", " ") + " UTC" if at_us else "–"


environment = Environment(
    loader=PackageLoader("kvcustody.console.web", "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
environment.globals |= {"static": _static, "zip": zip}
environment.filters |= {
    "count": words.count,
    "duration": words.duration,
    "iso": iso,
    "brief": words.time_text,
    "relative": words.relative,
    "size": words.size,
    "minute": _minute,
    "second": _second,
    "clock": _clock,
    "percent": lambda pair: words.percent(*pair),
}
environment.filters |= {"sparkline": _sparkline}
environment.filters |= {"seconds": seconds_text, "share": share_text}


def render(template: str, **context: Any) -> str:
    """Return a page's text."""
    return environment.get_template(template).render(**context)
