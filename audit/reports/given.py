"""People's input to a report: a proof of the policy, and answers to exceptions (`read_responses`, from TOML)."""

from __future__ import annotations

import tomllib
from typing import NamedTuple

from kvcustody.errors import ConfigError

NOT_GIVEN = "not given"
RESPONSES_MAX = 1000


class ReportedProperty(NamedTuple):
    """One property of a policy proof, and the number of cells examined."""

    id: str
    title: str
    holds: bool
    cells: int


class PolicyProof(NamedTuple):
    """A supplied proof of the policy; `is_active`: the ledger activated a policy with this digest."""

    policy: str
    digest: str
    holds: bool
    is_active: bool
    proof_digest: str
    properties: tuple[ReportedProperty, ...]


class Response(NamedTuple):
    """People's answer to one exception, by its id; `date` is when it will be, or was, corrected."""

    id: str
    owner: str
    date: str
    response: str
    compensating_control: str


def read_responses(text: str) -> tuple[Response, ...]:
    """Return the answers; omitted parts are `not given`. Raises `ConfigError` for anything else."""
    try:
        value = tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise ConfigError(f"responses: {problem}") from None
    listed = value.pop("response", [])
    if value or not isinstance(listed, list) or len(listed) > RESPONSES_MAX:
        raise ConfigError(f"responses: one list `response` of at most {RESPONSES_MAX} is expected")
    responses = []
    for each in listed:
        unknown = set(each) - set(Response._fields) if isinstance(each, dict) else {"?"}
        if unknown or not all(isinstance(said, str) for said in each.values()) or not each.get("id"):
            raise ConfigError(f"responses: each has an `id` and texts for {', '.join(Response._fields[1:])}")
        responses.append(Response(*(each.get(name, NOT_GIVEN) for name in Response._fields)))
    return tuple(responses)
