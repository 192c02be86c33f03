"""Forgeries of a document's facts: every place of it, edited, deleted, or with something inserted beside it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from kvcustody.audit.reports.document import Facts

Place = tuple[str | int, ...]
Change = Callable[[Any, str | int, random.Random], None]


class Forgery(NamedTuple):
    """Facts with one change: how, at which path as the verifier writes it."""

    how: str
    path: str
    facts: dict[str, Any]


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    """Every field, list and object."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in items:
        yield from places(each, (*at, name))


def written(at: Place) -> str:
    """A path as the verifier writes it."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in at).removeprefix(".")


def shape(at: Place) -> Place:
    """A place without its numbers: all items of a list have one."""
    return tuple("*" if isinstance(step, int) else step for step in at)


def one_of_each(facts: Facts, chance: random.Random) -> list[Place]:
    """One place of each shape."""
    by_shape: dict[Place, list[Place]] = {}
    for at in places(dict(facts)):
        if at:
            by_shape.setdefault(shape(at), []).append(at)
    return [chance.choice(each) for each in by_shape.values()]


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


def edit(holder: Any, step: str | int, chance: random.Random) -> None:
    """Another value of the same type."""
    holder[step] = changed(holder[step], chance)


def delete(holder: Any, step: str | int, chance: random.Random) -> None:
    """The field, or the item, is gone."""
    del holder[step]


def insert(holder: Any, step: str | int, chance: random.Random) -> None:
    """An item once more in front of itself, or a field that no model has beside it."""
    if isinstance(step, int):
        holder.insert(step, json.loads(json.dumps(holder[step])))
    else:
        holder[f"{step}_made_up"] = holder[step]


CHANGES: dict[str, Change] = {"edit": edit, "delete": delete, "insert": insert}


def forge(facts: Facts, at: Place, how: str, chance: random.Random) -> Forgery:
    """One change at a place of a copy."""
    made = json.loads(json.dumps(dict(facts)))
    holder = made
    for step in at[:-1]:
        holder = holder[step]
    CHANGES[how](holder, at[-1], chance)
    return Forgery(how, written(at), made)


def forge_any(facts: Facts, chance: random.Random) -> Forgery:
    """An edit of one field of a part that chance takes."""
    part = chance.choice(sorted(facts))
    at = chance.choice([(part, *below) for below in places(facts[part])])
    return forge(facts, at, "edit", chance)


def walk(facts: Facts, seed: int = 0) -> Iterator[Forgery]:
    """Every change at one place of each shape."""
    chance = random.Random(seed)
    for at in one_of_each(facts, chance):
        for how in CHANGES:
            yield forge(facts, at, how, chance)
