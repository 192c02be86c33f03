"""The door's hints beside the token, in SGLang's `custom_params`: trace, kinds of content, and latency class.

    put_custom(body, "kvcustody_marks", [[0, 12, "system_prompt"]])      # at the door
    carried = take_custom(sampling_params)                                # in the scheduler

Lists in `custom_params` have no lists: spans go one behind the other. What the door would not have written says
nothing.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, Final, NamedTuple, Protocol

from kvcustody.errors import ConfigError
from kvcustody.governance.identity.w3c_trace import is_trace
from kvcustody.governance.request import LATENCY_CLASSES, read_kinds
from kvcustody.policies.document.token_priorities import KindRange

CUSTOM_PARAMS: Final = "custom_params"
TRACE: Final = "kvcustody_trace"
KINDS: Final = "kvcustody_kinds"  # what the caller says, which can only lower
MARKS: Final = "kvcustody_marks"  # what the server found by roles, behind the door
LATENCY: Final = "kvcustody_latency"  # the class that the caller gives it


class CarriedHints(NamedTuple):
    """The hints that came with a request."""

    kinds: tuple[KindRange, ...] = ()
    trace: str = ""
    latency: str = ""


class _Sampling(Protocol):
    custom_params: Any


_NOTHING = CarriedHints()


def put_custom(holder: dict[str, Any], field: str, value: str | list[list[Any]]) -> None:
    """Add the hints to the holder's `custom_params`; the engine refuses a holder whose field has another type."""
    given = holder.get(CUSTOM_PARAMS) or {}
    if isinstance(given, dict):
        flat = value if isinstance(value, str) else list(chain.from_iterable(value))
        holder[CUSTOM_PARAMS] = {**given, field: flat}


def take_custom(sampling: _Sampling) -> CarriedHints:
    """Take our hints out, so that no later code sees them."""
    params = sampling.custom_params
    if not isinstance(params, dict) or not {TRACE, KINDS, MARKS, LATENCY} & params.keys():
        return _NOTHING
    rest = dict(params)
    trace, latency = rest.pop(TRACE, ""), rest.pop(LATENCY, "")
    said, marked = rest.pop(KINDS, ()), rest.pop(MARKS, ())
    sampling.custom_params = rest or None
    kinds = _spans(said, is_marked=False) + _spans(marked, is_marked=True)
    is_class = isinstance(latency, str) and latency in LATENCY_CLASSES
    return CarriedHints(kinds, trace if isinstance(trace, str) and is_trace(trace) else "", latency if is_class else "")


def _spans(flat: Any, *, is_marked: bool) -> tuple[KindRange, ...]:
    """Return the carried spans; none where one of them is malformed."""
    try:
        triples = zip(flat[::3], flat[1::3], flat[2::3], strict=True)
        return read_kinds([KindRange(first, last, kind, is_marked) for first, last, kind in triples])
    except (TypeError, ValueError, ConfigError):
        return ()
