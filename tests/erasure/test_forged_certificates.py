"""Certificates that somebody changed: without the key every change is found; with it, found or listed as not shown."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from sqlalchemy import Engine

from kvcustody.audit.evidence.erasure.certificate import statement_text
from kvcustody.audit.tlog.signing_key import sign_statement
from kvcustody.audit.verify import verify_certificate as verifier
from kvcustody.audit.verify.verify_certificate import verify
from kvcustody.signed_document import encode_ascii
from standins.erasure.certificate_case import KEY, VKEYS, Case
from standins.erasure.signing import OLGA, orders

Place = tuple[str | int, ...]


@pytest.fixture
def case(store: Engine, tmp_path: Path, request: pytest.FixtureRequest) -> Case:
    return Case(store, tmp_path, lost=getattr(request, "param", False))


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    """Every field, list and object."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in items:
        yield from places(each, (*at, name))


def written(at: Place) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in at).removeprefix(".")


def changed(value: Any, chance: random.Random) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return chance.choice((value + 1, 2 * value + 7, max(0, value - 1) if value else 3, 999_999))
    if isinstance(value, str):
        return chance.choice((value + "x", "None.", value[:-1] or "y", "complete", "partial"))
    if isinstance(value, list):
        return chance.choice((value[1:], [*value, value[-1]], [])) if value else ["made up"]
    if value is None:
        return chance.choice((1, "made up"))
    return chance.choice((dict([*value.items()][1:]), value | {"made_up": 1}))


def forge(document: dict[str, Any], chance: random.Random) -> tuple[dict[str, Any], str]:
    """One field of a part that chance takes, signed anew by who has the key."""
    made = json.loads(json.dumps(document))
    body = made["body"]
    part = chance.choice(sorted(body))
    at = (part, *chance.choice(list(places(body[part]))))
    holder = body
    for step in at[:-1]:
        holder = holder[step]  # type: ignore[index]
    holder[at[-1]] = changed(holder[at[-1]], chance)  # type: ignore[index]
    return made, written(at)


def signed(document: dict[str, Any]) -> bytes:
    signature = sign_statement(KEY, statement_text(KEY.name, encode_ascii(document["body"])))
    document["signature"]["data"] = __import__("base64").b64encode(signature.data).decode()
    return orjson.dumps(document)


def survives(case: Case, seed: int) -> str | None:
    """The field of a forgery by who has the key, where it is neither found nor listed."""
    made, path = forge(case.document, random.Random(seed))
    if made["body"] == case.document["body"]:
        return None
    assert not verify(orjson.dumps(made), VKEYS, case.opening).ok, f"whoever has no key: {path}"
    found = verify(signed(made), VKEYS, case.opening)
    return path if found.ok and not any(one.is_about(path) for one in found.unchecked) else None


@pytest.mark.parametrize("case", [False, True], indirect=True, ids=["complete", "partial"])
@pytest.mark.parametrize("count", [250, pytest.param(1000, marks=pytest.mark.soak)])
def test_every_forgery_is_found_or_its_field_is_among_those_not_shown(case: Case, count: int) -> None:
    assert verify(case.data, VKEYS, case.opening).ok, "control: the certificate itself"
    assert [path for path in (survives(case, seed) for seed in range(count)) if path] == []


def test_the_control_without_the_comparisons_forgeries_survive(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_check_request", "_check_statements", "_check_outcome"):
        monkeypatch.setattr(verifier, name, lambda *_: None)
    assert sum(survives(case, seed) is not None for seed in range(120)) > 5


def test_what_is_not_shown_is_said_and_shrinks_with_the_opening(case: Case) -> None:
    bare = {one.path for one in verify(case.data, VKEYS).unchecked}
    opened = {one.path for one in verify(case.data, VKEYS, case.opening).unchecked}
    assert bare - opened == {"request.commitment"}
    assert opened == {"issued_us", "workers", "population", "monitored", "holds", "leaves", "request"}
    ordered = {one.path for one in verify(case.data, VKEYS, case.opening, orders(OLGA)).unchecked}
    assert opened - ordered == {"request"}
