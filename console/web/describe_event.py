"""Leaves in words: one line that says what happened, and the fields with times, blocks and lists made readable.

1. Nothing is left out: run lists appear by their count, and the canonical bytes stand beside these words.
"""

from __future__ import annotations

from typing import Any

from kvcustody.console.report.number_format import count, duration, moment

_HEAD = frozenset(
    {"schema", "kind", "outage", "log", "incarnation", "sequence", "at_us", "boot_us", "part", "parts"}
)
_SAYS = {
    "access": "{actor} read the ledger ({operation})",
    "principal-changed": "{actor}: {action} of {principal}",
    "decision": "{effect}: {reader} asked for blocks of {owner}, decided by {rule}",
    "residency-opened": "a request of {tenant} was admitted, classified {classification}",
    "residency-released": "a request of {tenant} ended ({cause})",
    "blocks-attached": "a request of {tenant} attached {blocks} blocks",
    "blocks-released": "a request of {tenant} gave back {blocks} blocks",
    "holds-narrowed": "a new revision made holds of {tenant} end earlier",
    "custody-ended": "custody of {blocks} blocks of {tenant} ended ({cause})",
    "receipt": "memory of {blocks} blocks of {tenant} was overwritten ({method}), verified: {level}",
    "erasure-requested": "{actor} asked for an erasure of a {selector}",
    "erasure-completed": "an erasure was answered as {outcome}",
    "policy-activated": "revision {revision} of the policy took effect",
    "release-step": "{actor}: {action} revision {revision}",
    "worker-started": "worker {worker} began",
    "worker-stopped": "worker {worker} stopped ({cause})",
    "worker-died": "worker {worker} ended without saying so",
    "orphan-found": "an orphan: {orphan} ({cause})",
    "custody-overdue": "custody of {tenant} is past its deadline",
    "hit-counters": "{requests} requests of {tenant} to {owner}: {effect}, by {rule}",
    "signing-key": "the key that signs checkpoints was recorded",
    "gap": "events were lost, and that is on record ({cause})",
}


class _Fields(dict[str, Any]):
    """Fields that a sentence may name although a leaf does not have them."""

    def __missing__(self, key: str) -> str:
        return "–"


def summary_of(body: dict[str, Any]) -> str:
    """What happened, in one line."""
    says = _SAYS.get(body["kind"])
    return body["kind"].replace("-", " ") if says is None else says.format_map(_Fields(body))


def facts_of(body: dict[str, Any]) -> list[tuple[str, str]]:
    """The fields of a leaf but its head, readable."""
    return [(name.replace("_", " "), _text(name, value)) for name, value in body.items() if name not in _HEAD]


def _text(name: str, value: Any) -> str:
    if name in ("runs", "written", "attached") and isinstance(value, list):
        runs = "run" if len(value) == 1 else "runs"
        return f"{count(len(value))} {runs} of blocks, listed in the canonical bytes"
    if isinstance(value, list):
        return ", ".join(str(item) for item in value) or "none"
    if value is None or value == "":
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int):
        return str(value)
    if name in ("scrub_within_us", "age_us"):
        return duration(value)
    if name.endswith("_boot_us"):
        return f"{count(value)} µs on the worker's boot clock" if value else "–"
    return moment(value) if name.endswith("_us") else count(value)
