"""What travels in `custom_params`: what was put in comes out, what is not ours stays, and nonsense says nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvcustody.governance.request import KINDS_MAX
from kvcustody.integrations.content.custom_params import (
    CUSTOM_PARAMS,
    KINDS,
    LATENCY,
    MARKS,
    TRACE,
    CarriedHints,
    put_custom,
    take_custom,
)
from kvcustody.policies.document.token_priorities import KindRange

SPANS = [[0, 9, "system_prompt"], [40, 52, "tool_schema"]]


def taken(params: Any) -> tuple[CarriedHints, Any]:
    """What is found, and what is left."""
    sampling = SimpleNamespace(custom_params=params)
    return take_custom(sampling), sampling.custom_params


def test_what_was_put_in_comes_out_and_the_rest_stays() -> None:
    body: dict[str, Any] = {CUSTOM_PARAMS: {"thinking_budget": 9}}
    put_custom(body, KINDS, [[3, 4, "pasted_log"]])
    put_custom(body, MARKS, SPANS)
    put_custom(body, TRACE, "4bf92f3577b34da6a3ce929d0e0e4736")
    put_custom(body, LATENCY, "batch")
    assert all(not isinstance(each, list) for each in body[CUSTOM_PARAMS][MARKS]), "no list in a list"
    found, rest = taken(body[CUSTOM_PARAMS])
    assert (found.trace, found.latency) == ("4bf92f3577b34da6a3ce929d0e0e4736", "batch")
    assert rest == {"thinking_budget": 9}
    assert found.kinds == (
        KindRange(3, 4, "pasted_log", False),
        KindRange(0, 9, "system_prompt", True),
        KindRange(40, 52, "tool_schema", True),
    )


def test_nothing_is_left_where_all_was_ours() -> None:
    body: dict[str, Any] = {}
    put_custom(body, MARKS, SPANS)
    assert taken(body[CUSTOM_PARAMS])[1] is None
    assert taken({"thinking_budget": 9}) == (CarriedHints(), {"thinking_budget": 9})
    assert taken(None) == (CarriedHints(), None)


@pytest.mark.parametrize(
    "flat",
    [[0, 9], [9, 0, "x"], ["a", "b", "c"], [0, 9, 7], [-1, 9, "x"], 7, "abc", {"a": 1}, None,
     [0, 9, "x", 4], [each for at in range(KINDS_MAX + 1) for each in (at, at + 1, "x")]],
)  # fmt: skip
@pytest.mark.parametrize("field", [KINDS, MARKS])
def test_what_are_no_spans_say_nothing_and_do_not_stay(flat: Any, field: str) -> None:
    assert taken({field: flat, TRACE: 7, LATENCY: "soon"}) == (CarriedHints(), None)


def test_where_there_is_no_room_nothing_is_put() -> None:
    body: dict[str, Any] = {CUSTOM_PARAMS: "somebody's"}
    put_custom(body, MARKS, SPANS)
    assert body == {CUSTOM_PARAMS: "somebody's"}
