"""Time zones by their IANA names: those that any machine knows, for what is entered, and all others for what is read.

1. What is entered is a name of a zone today (`Europe/Berlin`, `Etc/GMT+5`). Former names such as `US/Eastern` are links
   that distributions leave out, and files beside the zones (`posixrules`, `localtime`) are no zones.
2. Which names those are, the machine's own data say: `tzdata.zi` and `zone.tab` of the system, or of the package
   `tzdata`. Where neither is there, every name that opens is taken.
3. `UTC` is known without any data.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, tzinfo
from functools import cache
from importlib import resources
from pathlib import Path
from zoneinfo import TZPATH, ZoneInfo

from kvcustody.errors import ConfigError


def open_zone(name: str) -> tzinfo:
    """The zone of a name that this machine knows; raises `ConfigError` for another."""
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (ValueError, OSError, LookupError):
        raise ConfigError(
            f"time zone `{name}` is not known here: give an IANA name, as `Europe/Berlin`", zone=name
        ) from None


def check_zone(name: str) -> None:
    """Raise `ConfigError` for a name that other machines may not know (rule 1)."""
    names, links = _names()
    if name == "UTC" or name in names:
        open_zone(name)
        return
    target = links.get(name)
    if target is not None:
        raise ConfigError(
            f"time zone `{name}` is a former name, which other machines may not know: write `{target}`",
            zone=name,
        )
    if names:
        raise ConfigError(f"time zone `{name}` is not known here: give an IANA name, as `Europe/Berlin`", zone=name)
    open_zone(name)


@cache
def _names() -> tuple[frozenset[str], Mapping[str, str]]:
    """The names of zones today, and the former ones with what they link to (rule 2)."""
    rules = [line.split() for line in _data("tzdata.zi").splitlines()]
    places = [line.split("\t") for line in _data("zone.tab").splitlines() if not line.startswith("#")]
    if not rules or not places:
        return frozenset(), {}
    names = {line[1] for line in rules if line[:1] == ["Z"]} | {line[2] for line in places}
    links = {line[2]: line[1] for line in rules if line[:1] == ["L"]}
    return frozenset(names - {"Factory"}), links


def _data(file: str) -> str:
    for folder in TZPATH:
        path = Path(folder, file)
        if path.is_file():
            return path.read_text(encoding="utf-8")
    try:
        return resources.files("tzdata.zoneinfo").joinpath(file).read_text(encoding="utf-8")
    except (ModuleNotFoundError, OSError):
        return ""
