"""What is wrong with a form: each fault at its field, in words that say the remedy.

    raise FieldError({"labels": "write `name=value`, with commas between them"})
    wrong_fields(error, names)      # {"tenant": "the ledger knows no tenant `acne`: did you mean `acme`?"}

A fault that belongs to no field of the form stands above it, under the name "".
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import ValidationError

from kvcustody.errors import CustodyError
from kvcustody.governance.service.problem_details import ProblemError

_NAMED = re.compile(r"`(\w+)`")
_REMEDIES = {
    "missing": "fill this in",
    "string_type": "fill this in",
    "enum": "choose one of: {expected}",
    "literal_error": "choose one of: {expected}",
    "string_too_long": "use at most {max_length} characters",
    "string_too_short": "fill this in",
    "string_pattern_mismatch": "write it in the form `{pattern}`",
    "greater_than_equal": "use at least {ge}",
    "less_than": "use less than {lt}",
    "less_than_equal": "use at most {le}",
    "too_long": "give at most {max_length}",
}


class FieldError(ProblemError):
    """A form that was not accepted, with what is wrong by field."""

    def __init__(self, wrong: Mapping[str, str]) -> None:
        super().__init__("invalid", "; ".join(f"`{name}`: {text}" if name else text for name, text in wrong.items()))
        self.wrong = dict(wrong)


def refused(error: ValidationError) -> FieldError:
    """Return the error for a form that its model does not accept."""
    return FieldError({str(item["loc"][0]) if item["loc"] else "": _remedy(dict(item)) for item in error.errors()})


def wrong_fields(error: CustodyError, problem: ProblemError, names: Collection[str]) -> dict[str, str]:
    """Return what is wrong by field.

    Args:
        error: What was raised.
        problem: The problem that it is answered as.
        names: The form's fields.

    Returns:
        The remedies by the name of a field, or under "" where the error belongs to none.
    """
    if isinstance(error, FieldError):
        return error.wrong
    detail = problem.detail or problem.type.advice
    named = [name for name in error.operands if name in names]
    named += [name for name in _NAMED.findall(detail) if name in names]
    return {named[0] if named else "": detail}


def _remedy(item: dict[str, Any]) -> str:
    form = _REMEDIES.get(item["type"])
    if form is not None:
        return form.format_map(item.get("ctx") or {})
    return str(item["msg"]).removeprefix("Value error, ")
