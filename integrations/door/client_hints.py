"""Clients' hints about retention and priority, clipped to the operator's bounds.

1. Hints only lengthen or hurry. What is asked beyond the operator's bounds is lowered to them, never refused; what is
   not well-formed is.
2. `priority` and those of `nvext.agent_hints` go on within `priority`. `nvext.cache_control.ttl` and times in
   `kv_hints` go on up to `retain_seconds`. Actions of `kv_hints` go on by their type; `speculative_prefill` is the
   action `prefetch`.
3. Both values of every hint are told: what was asked, and what went on.
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

from kvcustody.integrations.door.passed_fields import unlisted
from kvcustody.integrations.identity.refusal import malformed

_PRIORITIES: Final = ("priority", "strict_priority")
_OUTPUT_TOKENS_MAX: Final = 1 << 20
_ACTIONS_MAX: Final = 64
_SECONDS_FIELDS: Final = ("ttl", "ttl_seconds", "ttl_s", "retain_seconds", "duration_seconds")
_MS_FIELDS: Final = ("ttl_ms", "retain_ms", "duration_ms")
_TTL = re.compile(r"([0-9]{1,9})(s|m|h)")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600}
_ACTION_FIELDS: Final = {"action_id": str, "action_type": str, "action_version": str}


class HintBounds(NamedTuple):
    """The operator's bounds: a range of priorities, seconds of retention, and types of actions."""

    priority: tuple[int, int] = (0, 0)
    retain_seconds: int = 0
    actions: frozenset[str] = frozenset()


class ClippedHint(NamedTuple):
    """One hint in a request: the client's value, and the forwarded value (None: none)."""

    name: str
    asked: object
    passed: object

    @property
    def is_less(self) -> bool:
        """Whether the forwarded value is less than the client's."""
        return self.asked != self.passed


def clip_hints(body: dict[str, Any], bounds: HintBounds) -> tuple[dict[str, Any], list[ClippedHint]]:
    """Take the hints out of a body and return the forwarded ones, with the outcome of each.

    Raises:
        RequestRefused: a hint is malformed.
    """
    clipped_hints: list[ClippedHint] = []
    kept: dict[str, Any] = {}
    priority = body.pop("priority", None)
    if priority is not None:
        kept["priority"] = _clip_priority("priority", priority, bounds, clipped_hints)
    for name, clip in (("nvext", _clip_nvext), ("kv_hints", _clip_actions)):
        given = body.pop(name, None)
        if given is None:
            continue
        if not isinstance(given, dict):
            raise malformed(name, "is not an object")
        passed = clip(given, bounds, clipped_hints)
        if passed:
            kept[name] = passed
    return kept, clipped_hints


def _clip_priority(name: str, asked: object, bounds: HintBounds, clipped_hints: list[ClippedHint]) -> int:
    if type(asked) is not int:
        raise malformed(name, "is not a whole number")
    least, most = bounds.priority
    clipped_hints.append(ClippedHint(name, asked, passed := min(max(asked, least), most)))
    return passed


def _clip_nvext(given: dict[str, Any], bounds: HintBounds, clipped_hints: list[ClippedHint]) -> dict[str, Any]:
    passed: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        if name == "agent_hints" and isinstance(value, dict):
            hints = _clip_agent_hints(value, bounds, clipped_hints)
            passed |= {name: hints} if hints else {}
        elif name == "cache_control" and isinstance(value, dict):
            control = _clip_cache_control(value, bounds, clipped_hints)
            passed |= {name: control} if control else {}
        else:
            raise unlisted(f"nvext.{name}")
    return passed


def _clip_agent_hints(given: dict[str, Any], bounds: HintBounds, clipped_hints: list[ClippedHint]) -> dict[str, Any]:
    passed: dict[str, Any] = {}
    for field, value in given.items():
        name = f"nvext.agent_hints.{field}"
        if value is None:
            continue
        if field in _PRIORITIES:
            passed[field] = _clip_priority(name, value, bounds, clipped_hints)
        elif field == "osl" and type(value) is int and 0 <= value <= _OUTPUT_TOKENS_MAX:
            passed[field] = value
        elif field == "speculative_prefill" and type(value) is bool:
            is_allowed = value and "prefetch" in bounds.actions
            clipped_hints.append(ClippedHint(name, value, is_allowed))
            passed[field] = is_allowed
        else:
            raise unlisted(name)
    return passed


def _clip_cache_control(given: dict[str, Any], bounds: HintBounds, clipped_hints: list[ClippedHint]) -> dict[str, Any]:
    """Return `{type: ephemeral, ttl: 5m}` with a shorter `ttl`; without one, engines use five minutes."""
    ttl = given.get("ttl", "5m")
    matched = _TTL.fullmatch(ttl) if isinstance(ttl, str) else None
    if given.keys() - {"type", "ttl"} or given.get("type", "ephemeral") != "ephemeral" or matched is None:
        raise malformed("nvext.cache_control", "is not `{type: ephemeral, ttl: 5m}`")
    asked = int(matched[1]) * _SECONDS[matched[2]]
    seconds = min(asked, bounds.retain_seconds)
    clipped_hints.append(ClippedHint("nvext.cache_control.ttl", asked, seconds or None))
    return {"type": "ephemeral", "ttl": f"{seconds}s"} if seconds else {}


def _clip_actions(given: dict[str, Any], bounds: HintBounds, clipped_hints: list[ClippedHint]) -> dict[str, Any]:
    """Return an envelope with only its permitted actions; nothing where none remains."""
    actions = given.get("actions", [])
    if given.keys() - {"protocol_version", "message_id", "actions"} or not _is_actions(actions):
        raise malformed("kv_hints", f"is not an envelope of at most {_ACTIONS_MAX} actions")
    passed = []
    for action in actions:
        kind = action["action_type"]
        is_allowed = kind in bounds.actions
        clipped_hints.append(ClippedHint("kv_hints.action", kind[:64], kind[:64] if is_allowed else None))
        if is_allowed:
            passed.append(action | {"payload": _clip_payload(action.get("payload", {}), bounds, clipped_hints)})
    return given | {"actions": passed} if passed else {}


def _is_actions(given: object) -> bool:
    return (
        isinstance(given, list)
        and len(given) <= _ACTIONS_MAX
        and all(
            isinstance(each, dict)
            and not each.keys() - {*_ACTION_FIELDS, "payload"}
            and all(isinstance(each.get(name), kind) for name, kind in _ACTION_FIELDS.items())
            and isinstance(each.get("payload", {}), dict)
            for each in given
        )
    )


def _clip_payload(payload: dict[str, Any], bounds: HintBounds, clipped_hints: list[ClippedHint]) -> dict[str, Any]:
    """Return a payload with its times reduced to the bounds."""
    clipped = dict(payload)
    for fields, scale in ((_SECONDS_FIELDS, 1), (_MS_FIELDS, 1000)):
        for field in fields:
            asked = payload.get(field)
            if asked is None:
                continue
            if type(asked) not in (int, float) or asked < 0:
                raise malformed(f"kv_hints.{field}", "is not a time")
            clipped[field] = min(asked, bounds.retain_seconds * scale)
            clipped_hints.append(ClippedHint(f"kv_hints.{field}", asked, clipped[field]))
    return clipped
