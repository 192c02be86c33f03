"""How many cached tokens a fleet keeps while subjects are erased: a recorded trace through a real router, by our names.

    python benchmarks/fleet/routers/erasures_and_hits.py smg TRACE --json benchmarks/results/erasures-and-hits.json

1. A trace in Mooncake's form, `--times` end to end, each time with other people and prompts. Each session is a subject
   of one tenant. Erasures come at a rate a day over that time, each of a subject that has been there.
2. The router places by `cache_salt`, which is the name that the door writes: the subject's, or the tenant's shared one.
   An erasure raises the subject's epoch; the shared one is raised in batches, `--epoch-minutes` apart.
3. Each worker's cache is that of `fleet_model`: blocks of a subject, the least recently used let go. An erasure ends
   its blocks in all of them. What is counted is the tokens of a prompt's leading blocks that its worker has.
4. The control raises the tenant's epoch with every erasure.
"""

from __future__ import annotations

import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "harness"))

from bench import Bench
from router_probes import chat
from running_router import Router, running

from kvcustody.governance.edge.erase_epochs import (
    EpochScope,
    EpochTags,
    EraseEpochs,
    KnownEpochs,
    RaisedEpoch,
)
from kvcustody.governance.edge.router_namespace import NamespaceAge, RouterNamespaces
from kvcustody.governance.keys.locked_buffer import KeyBuffer
from kvcustody.lab.fleet.fleet_model import WorkerCache
from kvcustody.lab.replay.traces.model import TraceRequest
from kvcustody.lab.replay.traces.readers import open_trace
from kvcustody.times import DAY_US, MINUTE_US

RATES: Final = (0, 100, 1000)
AT_ONCE: Final = 32
BLOCK_CHARACTERS: Final = 24
ISSUER, TENANT = "idp", "a"


class Naming(NamedTuple):
    """Whose name a request gets, and how far apart raises of the shared one are (0: with every erasure)."""

    is_shared: bool
    batch_us: int = 0


class Fleet:
    """The router, a cache for each of its workers, and the names of requests as erasures leave them."""

    def __init__(self, router: Router, naming: Naming, blocks_max: int) -> None:
        self._router, self._naming = router, naming
        self._caches = {worker: WorkerCache(blocks_max) for worker in router.workers}
        self._tags, self._lock = EpochTags(bytes(32)), threading.Lock()
        self._raised: list[RaisedEpoch] = []
        self._of_subject: dict[str, set[int]] = {}
        self._known = KnownEpochs(EraseEpochs(), self._tags)
        self._namespaces = RouterNamespaces(KeyBuffer.random())
        self._batched_us = -DAY_US
        self._is_waiting = False
        self.tokens = self.found_tokens = 0

    def ask(self, request: TraceRequest) -> None:
        """Send a request to where the router places it."""
        blocks = request.blocks.tolist()
        subject = str(request.session)
        person = None if self._naming.is_shared else subject
        age = NamespaceAge(self._known.of(ISSUER, TENANT, person))
        name = self._namespaces.of(ISSUER, TENANT, person, None, age)
        text = "".join(f"{block:0{BLOCK_CHARACTERS}x}" for block in blocks)
        answer = self._router.ask(chat(text, name) | {"max_tokens": 2})
        with self._lock:
            found, _ = self._caches[answer.worker].take(subject, blocks)
            self._of_subject.setdefault(subject, set()).update(blocks)
            self.tokens += request.input_tokens
            self.found_tokens += min(found * 512, request.input_tokens)

    def erase(self, subject: object, at_us: int) -> None:
        """End a subject's blocks, and raise what this way of naming raises."""
        with self._lock:
            blocks = self._of_subject.pop(str(subject), ())
            for cache in self._caches.values():
                cache.drop((str(subject), block) for block in blocks)
        self._is_waiting = True
        if not self._naming.is_shared:
            self._raise(EpochScope(ISSUER, TENANT, str(subject)))
        self.look(at_us)

    def look(self, at_us: int) -> None:
        """Raise the shared name's epoch where erasures wait and a batch is due."""
        if self._naming.is_shared and self._is_waiting and at_us >= self._batched_us + self._naming.batch_us:
            self._batched_us, self._is_waiting = at_us, False
            self._raise(EpochScope(ISSUER, TENANT, is_shared=True))

    def _raise(self, scope: EpochScope) -> None:
        number = len(self._raised) + 1
        self._raised.append(RaisedEpoch(number, self._tags.of(scope)))
        more = self._known.epochs.extended(self._raised[-1:], version=number, floor=0)
        self._known = KnownEpochs(more, self._tags)


def repeated(requests: list[TraceRequest], times: int) -> list[TraceRequest]:
    """The trace `times` end to end, with sessions and blocks of their own each time."""
    span_us = requests[-1].at_us + MINUTE_US
    blocks = 1 + max(int(one.blocks.max()) for one in requests if len(one.blocks))
    return [
        replace(
            one,
            at_us=one.at_us + turn * span_us,
            blocks=one.blocks + turn * blocks,
            session=f"{turn}-{one.session}",
        )
        for turn in range(times)
        for one in requests
    ]


def hits(router: Router, requests: list[TraceRequest], naming: Naming, per_day: int, blocks: int) -> dict[str, Any]:
    """Replay the trace once, with this many erasures a day."""
    chance, fleet = random.Random(per_day), Fleet(router, naming, blocks)
    span_us = requests[-1].at_us - requests[0].at_us
    count = round(per_day * span_us / DAY_US)
    moments = sorted(requests[0].at_us + chance.randrange(span_us) for _ in range(count))
    seen: list[object] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for start in range(0, len(requests), AT_ONCE):
            together = requests[start : start + AT_ONCE]
            while moments and seen and moments[0] <= together[0].at_us:
                fleet.erase(chance.choice(seen), moments.pop(0))
            fleet.look(together[0].at_us)
            list(pool.map(fleet.ask, together))
            seen += [one.session for one in together if one.turn == 0]
    return {
        "erasures": count - len(moments),
        "found_share": round(fleet.found_tokens / fleet.tokens, 4),
        "found_tokens": fleet.found_tokens,
    }


def main() -> None:
    """Print one JSON object: tokens found at each rate, and their ratio to those without erasures."""
    bench = Bench(__doc__, "httpx", "starlette")
    bench.add("router", choices=("smg", "vllm-router"))
    bench.add("traces", type=Path, nargs="+", help="files of Mooncake's form")
    bench.add("--workers", type=int, default=4)
    bench.add("--blocks", type=int, default=20_000, help="of 512 tokens, at each worker (default: %(default)s)")
    bench.add("--epoch-minutes", type=int, default=240, help="between batches (default: %(default)s)")
    bench.add("--requests", type=int, default=0, help="of each trace; 0 for all (default: %(default)s)")
    bench.add("--times", type=int, default=5, help="that each trace is replayed end to end (default: %(default)s)")
    options = bench.parse()
    namings = {
        "subject": Naming(is_shared=False),
        "tenant, in batches": Naming(is_shared=True, batch_us=options.epoch_minutes * MINUTE_US),
        "tenant, with every erasure": Naming(is_shared=True),
    }
    figures: dict[str, Any] = {}
    with running(options.router, options.workers) as router:
        for path in options.traces:
            once = list(open_trace(path, "mooncake"))[: options.requests or None]
            requests = repeated(once, options.times)
            for name, naming in namings.items():
                found = {rate: hits(router, requests, naming, rate, options.blocks) for rate in RATES}
                for rate, one in found.items():
                    one["to_none"] = round(one["found_tokens"] / found[0]["found_tokens"], 4)
                    figures.setdefault(path.name, {}).setdefault(name, {})[str(rate)] = one
                    print(path.name, name, rate, one, file=sys.stderr, flush=True)
        bench.keep(
            {"router": options.router, "version": router.version, "workers": options.workers, "found": figures},
            show=True,
        )


if __name__ == "__main__":
    main()
