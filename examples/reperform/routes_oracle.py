"""Route receipts again, from leaves alone: both halves joined by name, what they found, and what is wrong with them.

Leaves go in, the chapter of routes comes out. Nothing but the standard library is used.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Body = dict[str, Any]
GRACE_US = 300_000_000
SUMS = ("requests", "prompt_tokens", "found_tokens", "promises", "stale_misses")


def routes(
    leaves: Iterable[Body], names: Mapping[str, str], now_us: int, since_us: int, until_us: int
) -> Body:
    """The chapter; `names`: of workers, by incarnation. `now_us`: when the newest leaf was written."""
    halves: dict[tuple[str, str], tuple[list[Body], list[Body]]] = defaultdict(lambda: ([], []))
    for body in leaves:
        if body["kind"] in ("route-sent", "route-found"):
            is_near = since_us - GRACE_US <= int(body["at_us"]) < until_us + GRACE_US
            if is_near:
                halves[body["log"], body["receipt"]][body["kind"] == "route-found"].append(body)
    receipts = awaited = 0
    whole, problems = Counter[str](), Counter[str]()
    by: tuple[dict[str, Counter[str]], ...] = (defaultdict(Counter), defaultdict(Counter))
    for (log, _), (sent, found) in halves.items():
        sent.sort(key=lambda body: int(body["at_us"]))
        found.sort(key=lambda body: int(body["at_us"]))
        at_us = int((sent or found)[0]["at_us"])
        if not since_us <= at_us < until_us:
            continue
        receipts += 1
        lacks = _lacks(sent, found)
        awaited += bool(lacks) and now_us - at_us < GRACE_US
        problems.update([lacks] if lacks and now_us - at_us >= GRACE_US else [])
        problems.update(_wrong(sent, found, names))
        served = _served(sent, found, names)
        if served is None:
            continue
        figures = _figures(sent, served)
        whole.update(figures)
        by[0][names.get(served["incarnation"], "")].update(figures)
        by[1][log.removeprefix("tenant/")].update(figures)
        problems["promise-not-found"] += figures["stale_misses"]
    return {
        "receipts": receipts,
        "awaited": awaited,
        "measured": whole["requests"],
        **{name: whole[name] for name in ("prompt_tokens", "found_tokens", "promises")},
        **{name: whole[name] for name in ("promised_tokens", "kept_tokens", "stale_misses", "stale_tokens")},
        "workers": _rows(by[0]),
        "tenants": _rows(by[1]),
        "problems": [{"problem": name, "findings": problems[name]} for name in _ORDER if problems[name]],
    }


_ORDER = (
    "no-worker-half",
    "no-door-half",
    "two-door-halves",
    "sent-elsewhere",
    "more-than-allowed",
    "promise-not-found",
    "impossible-figures",
)


def _rows(counts: Mapping[str, Counter[str]]) -> list[Body]:
    return [{"name": name} | {key: counts[name][key] for key in SUMS} for name in sorted(counts)]


def _lacks(sent: list[Body], found: list[Body]) -> str:
    """The half that is missing."""
    if not sent:
        return "no-door-half" if any(body["asked"] for body in found) else ""
    answered = 0 < int(sent[0]["status"]) < 300
    return "no-worker-half" if answered and len(found) < int(sent[0]["requests"]) else ""


def _wrong(sent: list[Body], found: list[Body], names: Mapping[str, str]) -> Iterator[str]:
    """What the halves that are there say against each other, but for the promise."""
    if len(sent) > 1:
        yield "two-door-halves"
    for body in found:
        if not _is_possible(body):
            yield "impossible-figures"
    if not sent:
        return
    if len(found) > int(sent[0]["uses"]):
        yield "more-than-allowed"
    if who := sent[0]["worker"]:
        own = [int(body["at_us"]) for body in found if names.get(body["incarnation"], "") == who]
        for body in found:
            is_other = names.get(body["incarnation"], "") != who
            if is_other and not (own and int(body["at_us"]) <= max(own)):
                yield "sent-elsewhere"


def _is_possible(body: Body) -> bool:
    figures = 0 <= int(body["found_tokens"]) <= int(body["prompt_tokens"])
    return figures and int(body["queue"]) >= 0 and int(body["free_blocks"]) >= 0


def _served(sent: list[Body], found: list[Body], names: Mapping[str, str]) -> Body | None:
    """The half of who answered."""
    named = [body for body in found if sent and names.get(body["incarnation"], "") == sent[0]["worker"]]
    halves = [body for body in named or found if _is_possible(body)]
    return halves[-1] if halves else None


def _figures(sent: list[Body], served: Body) -> Counter[str]:
    prompt, found = int(served["prompt_tokens"]), int(served["found_tokens"])
    made = Counter({"requests": 1, "prompt_tokens": prompt, "found_tokens": found})
    if sent and int(sent[0]["promised_tokens"]) >= 0:
        promised = int(sent[0]["promised_tokens"])
        kept = min(found, promised)
        made += Counter(promises=1, promised_tokens=promised, kept_tokens=kept)
        made += Counter(stale_misses=int(kept < promised), stale_tokens=promised - kept)
    return made
