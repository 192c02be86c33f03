"""Decisions about moving copies in words: the copies found, the predicted times, the choice, the measured time.

    lines_of(request)          # one request, a sentence a line

1. Nothing is said that its row does not say; what was not known then is called so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvcustody.console.render.number_format import size, time_text
from kvcustody.plurals import several

_WHY = {
    "always": "the settings of this worker say that whatever is permitted is moved",
    "faster": "that was predicted to be faster than computing them",
    "not measured yet": "what either way takes was not measured yet, which only trying tells",
    "uncertain": "that was predicted to be faster, by less than predictions were wrong, and the request is interactive",
    "untried": "what restoring takes was not measured yet, and nothing is tried on an interactive request",
    "slower": "computing them was predicted to be faster",
    "tried": "one in sixteen is, of those that do not seem to pay: whether they do is known of these alone",
    "pays": "what comes back was expected to save more than storing takes",
    "does not pay": "what comes back was not expected to save as much as storing takes",
    "busy": "this step of the engine had copied out its share already",
}
_COMPARED = ("faster", "slower", "uncertain", "pays", "does not pay", "tried")
_OUTCOME = {
    "restore": {
        "done": "all blocks were restored",
        "partial": "a part was restored; the missing blocks were looked up again, or computed",
        "failed": "nothing came",
    },
    "store": {"done": "it is there", "failed": "the tier had no room for it or no buffer, or failed"},
}


def predicted_text(one: dict[str, Any], name: str) -> str:
    """Return a decision's prediction; 0 means "none yet" where the decision does not say that it compared both."""
    if one[name]:
        return time_text(one[name])
    return "not known yet" if one["reason"] not in _COMPARED else "under 1 µs"


def why(reason: str) -> str:
    """Return a decision's reason as the end of a sentence; an unknown reason is returned unchanged."""
    return _WHY.get(reason, reason)


def lines_of(request: dict[str, Any]) -> list[str]:
    """Return the lines about one request's look-up in tiers, `ExplainedRequest` as a dictionary."""
    attached, handed = request["attached_blocks"], request["written_blocks"]
    lines = [
        f"request {request['residency']} of `{request['tenant']}`, classified `{request['classification']}`: "
        f"{several(attached, 'block')} attached on the device, {several(handed, 'block')} handed out to be filled"
    ]
    decisions = request["decisions"]
    classes = {one["latency_class"] for one in decisions} - {""}
    if classes:
        lines.append(f"its latency class: {', '.join(sorted(classes))}")
    if not decisions:
        lines.append("no tier had the following blocks: they were computed")
    for one in decisions:
        lines += decision_lines(one)
    moved = [one for one in decisions if one["choice"] == "transfer"]
    if len(moved) > 1:
        took = sum(one["actual_us"] for one in moved)
        lines.append(f"together: {several(len(moved), 'transfer')} in {time_text(took)}")
    return lines


def decision_lines(decision: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of one decision, `RecordedTransfer` or `DecidedTransfer` as a dictionary."""
    tier, blocks = decision["tier"], several(decision["blocks"], "block")
    stored = decision["action"] == "store"
    verb = "offered to" if stored else "found in"
    yield f"{verb} {tier}: {blocks}, {size(decision['bytes'])}"
    transfer, again = (predicted_text(decision, name) for name in ("transfer_us", "recompute_us"))
    yield f"  predicted: {transfer} to {'store' if stored else 'restore'} them, {again} to compute them"
    if decision["choice"] != "transfer":
        yield f"  chosen: not to {decision['action']} them, as {why(decision['reason'])}"
        return
    yield f"  chosen: to {decision['action']} them, as {why(decision['reason'])}"
    yield f"  it took {time_text(decision['actual_us'])}: {_judged(decision)}"


def error_share(one: dict[str, Any]) -> float | None:
    """Return a prediction's error as a share of the measured time; None without a prediction or a transfer."""
    if not one["transfer_us"] or not one["actual_us"] or one["outcome"] != "done":
        return None
    return abs(int(one["transfer_us"]) - int(one["actual_us"])) / int(one["actual_us"])


def _judged(decision: dict[str, Any]) -> str:
    stored = decision["action"] == "store"
    parts = [_OUTCOME[decision["action"]].get(decision["outcome"], decision["outcome"])]
    if decision["part_blocks"]:
        parts[0] = (
            f"{several(decision['part_blocks'], 'block')} were restored; the missing ones were looked up "
            "again, or computed"
        )
    share = error_share(decision)
    if share is not None:
        over = decision["actual_us"] - decision["transfer_us"]
        parts.append(f"{time_text(abs(over))} {'more' if over > 0 else 'less'} than predicted ({share:.0%} of it)")
    if not stored and decision["outcome"] == "done" and decision["recompute_us"]:
        saved = decision["recompute_us"] - decision["actual_us"]
        parts.append(f"{time_text(abs(saved))} {'saved' if saved >= 0 else 'lost'} against computing")
    return "; ".join(parts)
