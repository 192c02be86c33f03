"""Route receipts again, from leaves alone: both halves joined by name, what they found, and what is wrong with them.

Leaves go in, the chapter of routes comes out. Nothing but the standard library is used.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Body = dict[str, Any]
KINDS = ("route-sent", "route-found")
GRACE_US, DOOR_GRACE_US, CLOCKS_APART_US = 300_000_000, 3_900_000_000, 1_000_000
HALVES_MAX = 1_000_000  # of either kind that a report counts: the newest
SUMS = ("requests", "prompt_tokens", "found_tokens", "promises", "stale_misses")


def routes(leaves: Iterable[Body], names: Mapping[str, str], now_us: int, since_us: int, until_us: int) -> Body:
    """The chapter; `names`: of workers, by incarnation. `now_us`: when the newest leaf was written."""
    mine = [body for body in leaves if body["kind"] in KINDS]
    since_us = max(_newest_since(mine, kind, since_us, until_us) for kind in KINDS)
    halves: dict[tuple[str, str], tuple[list[Body], list[Body]]] = defaultdict(lambda: ([], []))
    for body in mine:
        if since_us - DOOR_GRACE_US <= int(body["at_us"]) < until_us + DOOR_GRACE_US:
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
        own = _own(sent, found, names)
        lacks = _lacks(sent, found, own)
        is_late = now_us - at_us >= (GRACE_US if sent else DOOR_GRACE_US)
        awaited += bool(lacks) and not is_late
        problems.update([lacks] if lacks and is_late else [])
        problems.update(_wrong(sent, found, own))
        served = _served(sent, own)
        if not served:
            continue
        figures = _figures(sent, served)
        whole.update(figures)
        by[0][names.get(served[-1]["incarnation"], "")].update(figures)
        by[1][log.removeprefix("tenant/")].update(figures)
        problems["promise-not-found"] += figures["stale_misses"]
    return {
        "since_us": since_us,
        "receipts": receipts,
        "awaited": awaited,
        "measured": whole["requests"],
        **{name: whole[name] for name in ("prompt_tokens", "found_tokens", "promises")},
        **{name: whole[name] for name in ("promised_tokens", "kept_tokens", "stale_misses", "stale_tokens")},
        "workers": _rows(by[0]),
        "tenants": _rows(by[1]),
        "problems": [{"problem": name, "findings": problems[name]} for name in _ORDER if problems[name]],
    }


def _newest_since(leaves: list[Body], kind: str, since_us: int, until_us: int) -> int:
    """From when on a period has no more halves of a kind than are counted."""
    times = (int(body["at_us"]) for body in leaves if body["kind"] == kind)
    newest = sorted((at_us for at_us in times if since_us <= at_us < until_us), reverse=True)
    return newest[HALVES_MAX] + 1 if len(newest) > HALVES_MAX else since_us


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


def _own(sent: list[Body], found: list[Body], names: Mapping[str, str]) -> list[Body]:
    """The halves of who answered: of the worker that the answer names, else all."""
    if not sent or not sent[0]["worker"]:
        return found
    return [body for body in found if names.get(body["incarnation"], "") == sent[0]["worker"]]


def _lacks(sent: list[Body], found: list[Body], own: list[Body]) -> str:
    """The half that is missing."""
    if not sent:
        return "no-door-half" if any(body["asked"] for body in found) else ""
    answered = 0 < int(sent[0]["status"]) < 300
    return "no-worker-half" if answered and len(own) < int(sent[0]["requests"]) else ""


def _wrong(sent: list[Body], received: list[Body], own: list[Body]) -> Iterator[str]:
    """What the halves that are there say against each other, but for the promise."""
    if len(sent) > 1:
        yield "two-door-halves"
    for body in received:
        if not _is_possible(body):
            yield "impossible-figures"
    if not sent:
        return
    if len(received) > int(sent[0]["uses"]):
        yield "more-than-allowed"
    if own:
        last_us = max(int(body["at_us"]) for body in own)
        others = [int(body["at_us"]) for body in received if not any(body is one for one in own)]
        yield from ["sent-elsewhere" for at_us in others if at_us > last_us + CLOCKS_APART_US]


def _is_possible(body: Body) -> bool:
    figures = 0 <= int(body["found_tokens"]) <= int(body["prompt_tokens"])
    return figures and int(body["queue"]) >= 0 and int(body["free_blocks"]) >= 0


def _served(sent: list[Body], own: list[Body]) -> list[Body]:
    """The halves of who answered, one of each request of the engine."""
    requests = max(1, int(sent[0]["requests"])) if sent else 1
    return [body for body in own if _is_possible(body)][-requests:]


def _figures(sent: list[Body], served: list[Body]) -> Counter[str]:
    prompt, found = (sum(int(body[name]) for body in served) for name in ("prompt_tokens", "found_tokens"))
    figures = Counter({"requests": 1, "prompt_tokens": prompt, "found_tokens": found})
    if sent and int(sent[0]["promised_tokens"]) >= 0:
        promised = int(sent[0]["promised_tokens"])
        kept = min(found, promised)
        figures += Counter(promises=1, promised_tokens=promised, kept_tokens=kept)
        figures += Counter(stale_misses=int(kept < promised), stale_tokens=promised - kept)
    return figures
