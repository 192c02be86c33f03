"""Checks of JSON bodies: UTF-8, and one value for each name.

1. Two readers of one document must not read two things: a name that comes twice, another encoding and `NaN` are
   refused before anything reads the body.
2. Nesting is bounded, far below what readers of nested values bear: they call themselves for each level.
"""

from __future__ import annotations

import json
from typing import Any, Never

from kvcustody.governance.service.problem_details import ProblemError

DEPTH_MAX = 64


def check_json(body: bytes, content_type: str) -> None:
    """Raise `malformed` or `unsupported-media-type` for a body that another parser might read differently."""
    for part in content_type.split(";")[1:]:
        name, _, value = part.partition("=")
        if name.strip().lower() == "charset" and value.strip().strip('"').lower() not in ("utf-8", "utf8"):
            raise ProblemError("unsupported-media-type", "a body must be UTF-8")
    if not body:
        return
    try:
        document = json.loads(body.decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_number)
    except UnicodeDecodeError:
        raise ProblemError("malformed", "the body is not UTF-8") from None
    except RecursionError:
        raise ProblemError("malformed", "the body is nested too deeply") from None
    except ValueError as error:
        if isinstance(error, json.JSONDecodeError):
            if body.startswith(b"\xef\xbb\xbf") or b"\0" in body[:4]:
                raise ProblemError("malformed", "the body is UTF-8 without a byte order mark") from None
            return  # what is no JSON at all is refused by who reads it, with the place
        raise ProblemError("malformed", str(error)) from None
    _check_depth(document)


def _check_depth(found: Any) -> None:
    """Raise `malformed` for a value of more levels than any document of ours has (rule 2)."""
    level = [found]
    for _ in range(DEPTH_MAX):
        held = [each for each in level if isinstance(each, (dict, list))]
        level = [child for each in held for child in (each.values() if isinstance(each, dict) else each)]
        if not level:
            return
    raise ProblemError("malformed", f"the body is nested deeper than {DEPTH_MAX} levels")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name appears twice in one object of the body")
    return found


def _no_number(text: str) -> Never:
    raise ValueError(f"`{text}` is no JSON number")
