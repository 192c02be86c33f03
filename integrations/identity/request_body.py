"""A request body for the engine: the same request, with our scope in place of the client's claims.

1. The body that leaves is the one that was checked. It is parsed once, with repeated names refused, and written again
   from the parsed values. So no second parser can read something else.
2. Afterwards `cache_salt` and `kv_transfer_params.kvcustody` hold our token and nothing of the client's. Other ways to
   the same place (`vllm_xargs`, `sampling_params.extra_args`) are refused. Beside the token there may be three more
   things; in SGLang's bodies these are in `custom_params`.
   - the trace of the request's headers, where it came with one and the body has room;
   - the client's statement about its content (`kvcustody_kinds`);
   - the client's statement about its urgency (`kvcustody_latency`).
3. Ids that the client chose and that the server keys state by are bound to their owner: request ids, sessions, stored
   responses, media uuids. Equal ids of different owners never collide.
4. Everything else is kept, value for value.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Iterable
from typing import Any, Final, NoReturn

import orjson

from kvcustody.errors import ConfigError
from kvcustody.governance.credentials.scope_token import Carried
from kvcustody.governance.request import KINDS_MAX, LATENCY_CLASSES, read_kinds
from kvcustody.integrations.content.custom_params import (
    CUSTOM_PARAMS,
    KINDS,
    LATENCY,
    MARKS,
    TRACE,
    put_custom,
)
from kvcustody.integrations.identity.refusal import malformed, not_found
from kvcustody.integrations.identity.routes import Body, Room, Scoped
from kvcustody.policies.document.token_priorities import KindRange

OUR_TRANSFER_FIELD: Final = "kvcustody"
OUR_TRACE_FIELD: Final = TRACE
OUR_KINDS_FIELD: Final = KINDS
OUR_MARKS_FIELD: Final = MARKS  # set behind the door alone (`message_kinds` of an engine)
OUR_LATENCY_FIELD: Final = LATENCY
_OURS: Final = (OUR_TRANSFER_FIELD, OUR_TRACE_FIELD, OUR_KINDS_FIELD, OUR_MARKS_FIELD, OUR_LATENCY_FIELD)
_TRANSFER_FIELDS = ("kv_transfer_params", "ec_transfer_params", "kv_hints")
_SESSION = "session_id"
_MEDIA_FIELDS = (
    *("messages", "input", "query", "queries", "documents", "items"),
    *("data_1", "data_2", "text_1", "text_2"),
)
_DEPTH_MAX = 64
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def parse_body(data: bytes) -> dict[str, Any]:
    """Return the JSON object in `data`.

    Raises:
        RequestRefused: it is something else (400), or repeats a name anywhere.
    """
    try:
        text = data.decode("utf-8")
        body = json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_finite)
    except (ValueError, RecursionError):
        raise malformed("body", "is not one JSON object with distinct names") from None
    if type(body) is not dict:
        raise malformed("body", "is not a JSON object")
    return body


def write_body(body: dict[str, Any]) -> bytes:
    """Return the body as JSON in UTF-8."""
    try:
        return orjson.dumps(body)
    except TypeError:  # what Python's JSON can carry and orjson cannot: long integers, lone surrogates
        return json.dumps(body, allow_nan=False, separators=(",", ":")).encode("ascii")


def take_client_salt(body: dict[str, Any]) -> object:
    """Remove the client's own salt wherever a router would read one; return it, or None."""
    given = body.pop("cache_salt", None)
    routed = body.get("nvext")
    nested = routed.pop("cache_salt", None) if isinstance(routed, dict) else None
    if nested is None:
        return given
    if given not in (None, nested):
        raise malformed("nvext", "names a different `cache_salt` than the body")
    return nested


def check_transfer(body: dict[str, Any], *, allowed: bool) -> None:
    """Remove our fields from the client's transfer parameters, and refuse others unless the deployment permits them."""
    for holder in _extra_arguments(body):
        if any(field in holder for field in _TRANSFER_FIELDS):
            raise malformed("vllm_xargs", "may not carry transfer parameters")
    for field in _TRANSFER_FIELDS:
        given = body.pop(field, None)
        if isinstance(given, dict):
            _remove_ours(given)
        if not given:
            continue
        if not allowed or not isinstance(given, dict):
            raise malformed(field, "is not accepted from tenants")
        body[field] = given
    for holder in (body, *_sampling(body)):
        given = holder.get(CUSTOM_PARAMS)
        if isinstance(given, dict):
            _remove_ours(given)


def refuse_fields(body: dict[str, Any], fields: Iterable[str]) -> None:
    """Refuse a body in which one of these fields is not empty."""
    for field in fields:
        if body.get(field) not in (None, False):
            raise malformed(field, "is not accepted from tenants")


def take_kinds(body: dict[str, Any]) -> tuple[KindRange, ...]:
    """Remove and return the client's kinds of content: `kvcustody_kinds`, spans of tokens as `{from, to, kind}`."""
    given = body.pop(OUR_KINDS_FIELD, None)
    if given is None:
        return ()
    try:
        return read_kinds([KindRange(each["from"], each["to"], each["kind"]) for each in given])
    except (TypeError, KeyError, ConfigError):
        raise malformed(OUR_KINDS_FIELD, f"is not a list of up to {KINDS_MAX} spans `{{from, to, kind}}`") from None


def put_kinds(body: dict[str, Any], kinds: tuple[KindRange, ...], scoped: Scoped) -> None:
    """Put the kinds where the engine reads them; a body without room goes without, because kinds only lower
    priorities.
    """
    if kinds:
        spans = [[each.first, each.last, each.kind] for each in kinds]
        _put(body, OUR_KINDS_FIELD, spans, scoped.room)


def take_latency(body: dict[str, Any]) -> str:
    """Remove and return the client's latency class: `kvcustody_latency`, `interactive` or `batch`."""
    given = body.pop(OUR_LATENCY_FIELD, None)
    if given is None:
        return ""
    if not isinstance(given, str) or given not in LATENCY_CLASSES:
        raise malformed(OUR_LATENCY_FIELD, "is neither `interactive` nor `batch`")
    return given


def put_latency(body: dict[str, Any], latency: str, scoped: Scoped) -> None:
    """Put the class where the engine reads it; a body without room goes without, because every way to serve it is
    safe.
    """
    if latency:
        _put(body, OUR_LATENCY_FIELD, latency, scoped.room)


def put_token(body: dict[str, Any], carried: Carried, scoped: Scoped) -> None:
    """Put the token where the engine reads it.

    Raises:
        RequestRefused: this kind of body has no room for it.
    """
    body["cache_salt"] = carried.cache_salt
    if carried.transfer is not None:
        if scoped.room is not Room.TRANSFER:
            raise malformed("identity", "is too long for this path; ask the operator for shorter names")
        body["kv_transfer_params"] = {
            **body.get("kv_transfer_params", {}),
            OUR_TRANSFER_FIELD: carried.transfer,
        }


def put_trace(body: dict[str, Any], trace: str, scoped: Scoped) -> None:
    """Put the request's trace where the engine reads it; a body without room goes without."""
    if trace:
        _put(body, OUR_TRACE_FIELD, trace, scoped.room)


def _put(body: dict[str, Any], field: str, value: Any, room: Room) -> None:
    if room is Room.TRANSFER:
        body["kv_transfer_params"] = {**body.get("kv_transfer_params", {}), field: value}
    elif room is Room.CUSTOM:
        put_custom(body, field, value)
    elif room is Room.SAMPLING:
        body.setdefault("sampling_params", {})
        for holder in _sampling(body):
            put_custom(holder, field, value)


def _remove_ours(given: dict[str, Any]) -> None:
    for field in _OURS:
        given.pop(field, None)


def _sampling(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a body's sampling parameters: for all its prompts, or one per prompt."""
    given = body.get("sampling_params")
    return [each for each in (given if isinstance(given, list) else [given]) if isinstance(each, dict)]


def bind_ids(body: dict[str, Any], kind: Body, owner: str, more: Iterable[str] = ()) -> None:
    """Bind every client-chosen id to `owner`, 16 hexadecimal digits (rule 3); `more`: other fields with ids."""
    for field in more:
        if body.get(field) is not None:
            body[field] = _bound_ids(field, body[field], owner)
    given = body.get("request_id")
    if kind is Body.RESPONSES:
        previous = body.get("previous_response_id")
        if previous is not None and not owns_response(owner, previous):
            raise not_found()
        own = secrets.token_hex(16) if given is None else check_id("request_id", given)
        body["request_id"] = f"resp_{owner}_{own}"
    elif given is not None:
        body["request_id"] = f"{owner}-{check_id('request_id', given)}"
    if kind is Body.GENERATE and body.get("features") is not None:
        raise malformed("features", "is not accepted from tenants: its media hashes name shared cache entries")
    for holder in (body, *_extra_arguments(body)):
        if _SESSION in holder:
            holder[_SESSION] = bound_session(_SESSION, holder[_SESSION], owner)
    for field in _MEDIA_FIELDS:
        if type(body.get(field)) in (list, dict):
            _bind_media(body[field], owner, 0)


def _bound_ids(param: str, value: object, owner: str) -> str | list[str]:
    """Return an id, or one per prompt of a batch."""
    if isinstance(value, list):
        return [f"{owner}-{check_id(param, each)}" for each in value]
    return f"{owner}-{check_id(param, value)}"


def bound_session(param: str, value: object, owner: str) -> str | None:
    """Return a client-chosen session id bound to its owner, because the engine's events carry it and routers use it."""
    return None if value is None or value == "" else f"{owner}-{check_id(param, value)}"


def _extra_arguments(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the place for the engine's own arguments in a body."""
    sampling = body.get("sampling_params")
    holders = (body.get("vllm_xargs"), sampling.get("extra_args") if isinstance(sampling, dict) else None)
    return [holder for holder in holders if isinstance(holder, dict)]


def owns_response(owner: str, response_id: object) -> bool:
    """Return whether `bind_ids` made the id for `owner`; the id need not exist."""
    return isinstance(response_id, str) and response_id.startswith(f"resp_{owner}_")


def check_id(param: str, value: object) -> str:
    """Return `value` unchanged if it is a client's well-formed id."""
    if type(value) is not str or _ID.fullmatch(value) is None:
        raise malformed(param, "must be 1 to 128 letters, digits, `.`, `_`, `:` or `-`")
    return value


def _bind_media(value: Any, owner: str, depth: int) -> None:
    """Prefix each content part's uuid with its owner. Parts occur only in lists named `content`."""
    if depth > _DEPTH_MAX:
        raise malformed("body", "nests too deeply")
    if type(value) is list:
        for item in value:
            if type(item) in (dict, list):
                _bind_media(item, owner, depth + 1)
    elif type(value.get("content")) is list:
        for part in value["content"]:
            if type(part) is dict and type(part.get("uuid")) is str:
                part["uuid"] = f"{owner}-{part['uuid']}"
        _bind_media(value["content"], owner, depth + 1)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is repeated")
    return found


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number is out of range")
    return number
