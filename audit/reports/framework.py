"""Frameworks: the controls that our evidence can serve, which evidence serves each control, and its limits.

1. `controls.toml` in this folder is the library: it describes each kind of evidence once, and the controls of each
   framework that it serves. No entry claims that a control is met.
2. Users add a framework with a file (`read_framework`) in the library's format. It refers to evidence by the library's
   names.
3. Anything in a file that the format does not define is an error that names the control.
4. A report may not use words that claim more than evidence can show (`refused_words`): "zeroized" is for memory we own,
   "crypto-erased" for media, "evidence supporting" for controls.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from kvcustody.errors import ConfigError

NAMES = (
    *("nist-800-53", "nist-800-88", "cc-fdp-rip", "iso-27001", "iso-27701", "iso-27018", "iso-42001", "soc2"),
    *(
        "gdpr",
        "hipaa",
        "pci-dss",
        "dora",
        "nis2",
        "eu-ai-act",
        "csa-ccm",
        "csa-aicm",
        "c5",
        "owasp-llm",
        "owasp-aisvs",
    ),
    "nist-ai-rmf",
)
EVIDENCE_PRESENT = "evidence present"
OURS, NOT_OURS, NOT_ADDRESSED = "ours", "not-ours", "not-addressed"
SCOPES = (OURS, NOT_OURS, NOT_ADDRESSED)
CONTROLS_MAX = 2000
ANSWER_DEADLINE = "answer-deadline"  # what shows that people were answered in time
_ABOUT = ("title", "edition", "ids_from", "ids_taken")


REFUSED: dict[str, str] = {
    r"\bcomplian(t|ce)\b": "say `evidence supporting <control>`",
    r"\bcompl(y|ies|ied|ying)\b": "say `evidence supporting <control>`",
    r"\bcertifie[ds]\b": "nobody certified anything here",
    r"\bsecure(ly)? (deleted?|erased?|wiped?)\b": "say `zeroized` (memory we own) or `crypto-erased` (media)",
    r"\bunrecoverable\b": "say how it was overwritten and verified",
    r"\bconstant (latency|time) (of|for) requests\b": "no such promise is made",
    r"\bconstant latency\b": "no such promise is made",
    r"\bguarantee[ds]?\b": "say what was measured, or proved, and of what",
    r"\b(fully|completely|100 ?%) (secure|safe|isolated)\b": "say what was shown",
    r"\btamper-?proof\b": "say `tamper-evident`, and until when",
    r"\bimpossible\b": "say what was tried",
}


class Showing(NamedTuple):
    """Something that evidence shows: the sections it needs, the sections cited beside them, and its limit."""

    name: str
    supports: str
    needs: tuple[str, ...]
    also: tuple[str, ...]
    limit: str
    clock: bool  # about a clock, which replayed history has none of


class Control(NamedTuple):
    """One control: who is responsible, our evidence for it, and the evidence's limits."""

    id: str
    title: str
    scope: str
    shows: tuple[Showing, ...]
    own_limit: str

    @property
    def supports(self) -> str:
        """What the cited sections show, independent of their figures."""
        return " ".join(each.supports for each in self.shows)

    @property
    def evidence(self) -> tuple[str, ...]:
        """The sections that may be cited."""
        return tuple(dict.fromkeys(name for each in self.shows for name in (*each.needs, *each.also)))

    @property
    def limit(self) -> str:
        """What all of its evidence does not show."""
        texts = (self.own_limit, *(each.limit for each in self.shows))
        return " ".join(text for text in texts if text)

    @property
    def clock(self) -> bool:
        """Whether the control is about a clock."""
        return any(each.clock for each in self.shows)


class Framework(NamedTuple):
    """A framework's edition, the source and date of its ids, and the controls that our evidence serves.

    `catalog` is the address of an OSCAL catalog that has these ids, or empty.
    """

    id: str
    title: str
    edition: str
    ids_from: str
    ids_taken: str
    catalog: str
    controls: tuple[Control, ...]

    @property
    def has_answer_deadline(self) -> bool:
        """Whether one of its controls requires an answer to a person within the time of GDPR 12(3)."""
        return any(each.name == ANSWER_DEADLINE for control in self.controls for each in control.shows)


class ControlStatus(NamedTuple):
    """A report's evidence for one control, and the sections that carry it."""

    control: str
    status: str
    sections: tuple[str, ...]


@cache
def load_framework(name: str) -> Framework:
    """Return a framework of the library; raises `ConfigError` for an unknown one."""
    if name not in NAMES:
        close = get_close_matches(name, NAMES, n=1, cutoff=0.5)
        hint = f"; did you mean `{close[0]}`?" if close else ""
        raise ConfigError(
            f"framework `{name}` is none of: {', '.join(NAMES)}; nor a file (.toml){hint}", framework=name
        )
    return _framework(name, _library()["framework"][name])


def read_framework(text: str) -> Framework:
    """Return a framework from a user's file (rule 2); raises `ConfigError` with the place of the error."""
    try:
        value = tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise ConfigError(f"framework file: {problem}") from None
    name = value.pop("id", None)
    if not isinstance(name, str) or not re.fullmatch(r"[a-z0-9][a-z0-9.-]{0,60}", name):
        raise ConfigError("framework file: `id` is lower-case letters, digits, `.` and `-`")
    if name in NAMES:
        raise ConfigError(f"framework file: `{name}` is the id of a library framework; choose another")
    return _framework(name, value)


@cache
def showings() -> dict[str, Showing]:
    """Return everything that evidence shows, by name."""
    return {
        name: Showing(
            name,
            item["supports"],
            tuple(item["needs"]),
            tuple(item["also"]),
            item["limit"],
            bool(item.get("clock")),
        )
        for name, item in _library()["shows"].items()
    }


@cache
def _library() -> dict[str, Any]:
    text = resources.files("kvcustody.audit.reports").joinpath("controls.toml").read_text("utf-8")
    return tomllib.loads(text)


def _framework(name: str, value: dict[str, Any]) -> Framework:
    problem = next(_problems(value), None)
    if problem is not None:
        raise ConfigError(f"framework `{name}`: {problem}", framework=name)
    controls = tuple(
        Control(
            item["id"],
            item["title"],
            item.get("scope", OURS),
            tuple(showings()[each] for each in item.get("shows", ())),
            item.get("limit", ""),
        )
        for item in value["controls"]
    )
    title, edition, ids_from, ids_taken = (str(value[each]) for each in _ABOUT)
    return Framework(name, title, edition, ids_from, ids_taken, value.get("catalog", ""), controls)


def _problems(value: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a framework (rule 3)."""
    for name in _ABOUT:
        if not isinstance(value.get(name), str) or not value[name]:
            yield f"it has no text `{name}`"
    unknown = value.keys() - {*_ABOUT, "catalog", "controls"}
    if unknown:
        yield f"`{min(unknown)}` is no part of a framework"
    if not isinstance(value.get("catalog", ""), str):
        yield "`catalog` is no text"
    controls = value.get("controls")
    if not isinstance(controls, list) or not 0 < len(controls) <= CONTROLS_MAX:
        yield f"`controls` is a list of 1 to {CONTROLS_MAX}"
        return
    seen: set[str] = set()
    for number, item in enumerate(controls, 1):
        if not isinstance(item, dict) or not isinstance(item.get("id"), str) or not item["id"]:
            yield f"control {number} has no text `id`"
            return
        for problem in _control_problems(item):
            yield f"control `{item['id']}`: {problem}"
        if item["id"] in seen:
            yield f"control `{item['id']}` is there twice"
        seen.add(item["id"])


def _control_problems(item: dict[str, Any]) -> Iterator[str]:
    unknown = item.keys() - {"id", "title", "scope", "shows", "limit"}
    if unknown:
        yield f"`{min(unknown)}` is no part of a control"
    for name in ("title", "limit"):
        text = item.get(name, "" if name == "limit" else None)
        if not isinstance(text, str) or (name == "title" and not text):
            yield f"it has no text `{name}`"
        else:
            yield from refused_words(text)
    scope, shows = item.get("scope", OURS), item.get("shows", [])
    if scope not in SCOPES:
        yield f"scope `{scope}` is none of: {', '.join(SCOPES)}"
    if not isinstance(shows, list) or (scope == OURS) is not bool(shows):
        yield "a control with scope `ours` needs `shows`, and no other scope has it"
        return
    if scope != OURS and not item.get("limit"):
        yield "a control with scope `not-ours` or `not-addressed` needs the reason in `limit`"
    for each in shows:
        if each not in showings():
            close = get_close_matches(str(each), showings(), n=1)
            hint = f"; did you mean `{close[0]}`?" if close else ""
            yield f"`{each}` is none of: {', '.join(sorted(showings()))}{hint}"


def refused_words(text: str) -> list[str]:
    """Return a text's forbidden words, each with what to write instead."""
    return [
        f"`{found.group(0)}`: {instead}"
        for pattern, instead in REFUSED.items()
        for found in re.finditer(pattern, text, re.IGNORECASE)
    ]
