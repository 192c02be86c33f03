"""What people answered to the exceptions of a report, from TOML: a list `response`, each with an exception's `id`."""

from __future__ import annotations

import tomllib

from kvcustody.audit.reports.opinion.opinion_model import NOT_GIVEN, Response
from kvcustody.errors import ConfigError

RESPONSES_MAX = 1000


def read_responses(text: str) -> tuple[Response, ...]:
    """The answers; what is left out of one is `not given`. Raises `ConfigError` for anything else."""
    try:
        value = tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise ConfigError(f"responses: {problem}") from None
    listed = value.pop("response", [])
    if value or not isinstance(listed, list) or len(listed) > RESPONSES_MAX:
        raise ConfigError(f"responses: one list `response` of at most {RESPONSES_MAX} is expected")
    made = []
    for each in listed:
        unknown = set(each) - set(Response._fields) if isinstance(each, dict) else {"?"}
        if unknown or not all(isinstance(said, str) for said in each.values()) or not each.get("id"):
            raise ConfigError(f"responses: each has an `id` and texts for {', '.join(Response._fields[1:])}")
        made.append(Response(*(each.get(name, NOT_GIVEN) for name in Response._fields)))
    return tuple(made)
