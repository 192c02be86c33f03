"""Timestamps in answers: each stands twice, in microseconds and in ISO 8601.

1. Beside `since_us` stands `since`, null where there is no moment or no calendar has it. A field is a moment where
   `MOMENTS` has its name. Every field whose name ends in `_us` is in `MOMENTS` or in `LENGTHS`, and in one alone.
2. Models state moments once. The second form is added where an answer becomes bytes, and where the API document is
   written. A part that a model leaves open, such as a leaf, stays unchanged, and so does a document that carries its
   signature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import cache
from operator import itemgetter
from typing import Any, NamedTuple, get_args

import numpy as np
import orjson
from pydantic import BaseModel, TypeAdapter

from kvcustody.times import iso

MOMENTS = frozenset({
    "absolute_us", "answered_us", "at_us", "behind_since_us", "changed_us", "created_us", "deadline_us", "delivered_us",
    "disabled_us", "due_us", "ended_us", "enrolled_us", "epoch_behind_since_us", "epoch_since_us",
    "expires_us", "failing_since_us", "failing_us", "first_us", "first_use_us", "from_us", "heard_us",
    "hold_us", "hour_us", "issued_us", "judged_us", "last_us", "measured_since_us", "made_us",
    "next_us", "not_after_us", "not_before_us", "now_us", "opened_us", "pending_until_us", "received_us",
    "released_us", "revoked_us",
    "seen_us", "since_us", "started_us", "taken_us", "until_us", "used_us", "utc_us", "wall_us",
})  # fmt: skip
"""Fields of answers that are moments, in UTC microseconds."""
LENGTHS = frozenset({
    "actual_us", "age_us", "ahead_us", "behind_us", "column_us", "measured_us", "net_us", "offset_us",
    "predicted_us", "predicted_actual_us", "recompute_us", "saved_us", "shortest_ceiling_us", "transfer_us",
    "unwitnessed_us",
})  # fmt: skip
"""Fields of answers that are lengths of time."""
_OF_COMMANDS = frozenset({"signed_us"})  # moments that commands print, and no answer has
_SIGNED = "signature"  # the field of a signed document
_END_US = 253_402_300_800_000_000  # the year 10,000
_EPOCH = datetime(1970, 1, 1)  # in UTC: what writes the answer takes it so, and faster than with a zone
_COLUMN_MIN = 24  # moments from which on a column at once costs less than each of them


def iso_field(name: str) -> str | None:
    """The field that gives the moment `name` in ISO 8601; None: `name` is no moment (rule 1)."""
    return name.removesuffix("_us") if name in MOMENTS else None


class AnswerTimes(NamedTuple):
    """The timestamp fields of a model's answers, and its parts that have some."""

    fields: tuple[tuple[str, str], ...]  # in microseconds, in ISO 8601
    parts: tuple[tuple[str, AnswerTimes], ...]  # by field: a model, or a list of them

    def add(self, answers: Sequence[dict[str, Any]]) -> None:
        """Add the ISO 8601 form of every timestamp to an answer."""
        for stated, added in self.fields:
            if len(answers) < _COLUMN_MIN:
                for answer in answers:
                    answer[added] = _moment(answer[stated])
            else:
                for answer, at in zip(answers, _moments(answers, stated), strict=True):
                    answer[added] = at
        for name, times in self.parts:
            times.add([item for answer in answers for item in _items(answer[name])])


@cache
def times_of(model: type[BaseModel]) -> AnswerTimes | None:
    """The timestamp fields of a model's answers; None where it has none."""
    if _SIGNED in model.model_fields:
        return None
    stated = {name: iso_field(name) for name in model.model_fields}
    added = tuple((name, other) for name, other in stated.items() if other is not None)
    assert not stated.keys() & {other for _, other in added}, f"{model.__name__}: a field of this name is there"
    inner = ((name, times_of(part)) for name, field in model.model_fields.items() for part in _models(field.annotation))
    parts = tuple((name, times) for name, times in inner if times is not None)
    return AnswerTimes(added, parts) if added or parts else None


def dated(model: type[BaseModel] | None, answer: dict[str, Any]) -> dict[str, Any]:
    """Return the answer with its timestamps in ISO 8601 added."""
    times = None if model is None else times_of(model)
    if times is not None:
        times.add([answer])
    return answer


def dated_data(data: Any) -> Any:
    """Return data that no model describes, with its timestamps in both forms."""
    if isinstance(data, (list, tuple)):
        return [dated_data(item) for item in data]
    if not isinstance(data, dict):
        return data
    moments = {name: item for name, item in data.items() if name in MOMENTS | _OF_COMMANDS}
    added = {name.removesuffix("_us"): _iso(item) for name, item in moments.items()}
    return {name: dated_data(item) for name, item in data.items()} | added


def answer_bytes(model: type[BaseModel] | None, answer: dict[str, Any]) -> bytes:
    """An answer as JSON, with its moments in both forms."""
    return orjson.dumps(dated(model, answer), option=orjson.OPT_NAIVE_UTC | orjson.OPT_UTC_Z)


def model_bytes(model: type[BaseModel]) -> Callable[[Any], bytes]:
    """Return the function that serializes answers of this model."""
    answers, times = TypeAdapter(model), times_of(model)

    def made(found: Any) -> bytes:
        valid = answers.validate_python(found)
        if times is None:
            return answers.dump_json(valid, by_alias=True)
        return answer_bytes(model, answers.dump_python(valid, mode="json", by_alias=True))

    return made


def date_schemas(document: dict[str, Any]) -> None:
    """Add the ISO 8601 form of every timestamp to an API document's answers and examples."""
    schemas: dict[str, Any] = document["components"]["schemas"]
    answers = [at["responses"] for path in document["paths"].values() for at in path.values()]
    for name in set(_references(answers, schemas, set())):
        schema = schemas[name]
        for stated in list(schema.get("properties", {})):
            added = iso_field(stated)
            if added is not None:
                schema["properties"][added] = _schema(stated, added)
                schema.setdefault("required", []).append(added)
        if "examples" in schema:
            schema["examples"] = dated_data(schema["examples"])


def _moments(answers: Sequence[dict[str, Any]], stated: str) -> list[datetime | None]:
    """A field of these answers as datetimes in UTC, many at once (a quarter of the time that one by one takes)."""
    column = map(itemgetter(stated), answers)
    with suppress(TypeError, OverflowError):  # where one is None, or larger than 64 bits
        stated_us = np.fromiter(column, dtype=np.int64, count=len(answers))
        if stated_us.min() >= 0 and stated_us.max() < _END_US:
            moments: list[datetime | None] = stated_us.view("datetime64[us]").tolist()
            return moments
    return [_moment(answer[stated]) for answer in answers]


def _moment(at_us: int | None) -> datetime | None:
    if at_us is None:
        return None
    try:
        return _EPOCH + timedelta(0, 0, at_us)
    except OverflowError:
        return None


def _iso(at_us: int | None) -> str | None:
    with suppress(OverflowError):
        return None if at_us is None else iso(at_us)
    return None


def _items(part: Any) -> list[dict[str, Any]]:
    return part if isinstance(part, list) else [] if part is None else [part]


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


def _references(value: Any, schemas: dict[str, Any], known: set[str]) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _references(item, schemas, known)
    elif isinstance(value, dict):
        name = str(value.get("$ref", "")).rpartition("/")[2]
        if name and name not in known and _SIGNED not in schemas[name].get("properties", {}):
            known.add(name)
            yield name
            yield from _references(schemas[name], schemas, known)
        yield from _references(list(value.values()), schemas, known)


def _schema(stated: str, added: str) -> dict[str, Any]:
    forms = [{"type": "string", "format": "date-time"}, {"type": "null"}]
    return {
        "anyOf": forms,
        "title": added.replace("_", " ").title(),
        "description": f"`{stated}` in ISO 8601.",
    }
