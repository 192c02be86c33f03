"""What a router does with a request: one probe a question, over recording workers.

Each probe returns plain figures. Those about placement count requests that went to the worker of an earlier one; beside
them is a control of unrelated prompts. A control outside 1/W +- 0.15 says that the router does not spread its load, and
voids the row.
"""

from __future__ import annotations

import json
import random
import string
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

from recording_worker import SLOW_TOKENS
from running_router import Router

TOKEN: Final = "t" * 900  # as long as a scope token with its signature and long names
HEADERS: Final = {
    "x-kvcustody-scope": TOKEN,
    "x-tenant-id": "namespace",
    "x-session-id": "session",
    "x-request-id": "request-1",
    "x-correlation-id": "correlation",
    "x-smg-routing-key": "routing-key",
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "tracestate": "kvcustody=1",
    "baggage": "kvcustody=1",
    "cookie": "a=b",
}
FIELDS: Final[dict[str, Any]] = {
    "cache_salt": "namespace",
    "kv_transfer_params": {"kvcustody": TOKEN},
    "custom_params": {"kvcustody": TOKEN},
    "vllm_xargs": {"kvcustody": "t"},
    "kvcustody_kinds": [{"from": 0, "to": 2, "kind": "x"}],
    "session_id": "session",
    "user": "user",
    "priority": 3,
}
CONTROL_MARGIN: Final = 0.15


class Carrier(NamedTuple):
    """Which of the door's headers and fields arrive unchanged, and whether the rest of the body does.

    `added` fields the router wrote itself. `changed` fields arrive with another value.
    """

    headers: tuple[str, ...]
    headers_lost: tuple[str, ...]
    fields: tuple[str, ...]
    fields_lost: tuple[str, ...]
    authorization: bool
    same_bytes: bool
    added: tuple[str, ...]
    changed: tuple[str, ...]
    response_headers: tuple[str, ...]


class Retries(NamedTuple):
    """How often one request was presented while workers answered 503, and to how many of them."""

    presentations: int
    workers: int
    status: int


class Renders(NamedTuple):
    """Requests to `/v1/chat/completions/render`: of one completion, at how many workers, with which credential."""

    requests: int
    workers: int
    authorization: bool
    text: bool


class Residue(NamedTuple):
    """Copies of a phrase in the router's memory, right after its request and later. The phrase stood in it 30 times."""

    at_once: int
    later: int
    later_seconds: int
    requests_between: int


class Placement(NamedTuple):
    """Of `asked` pairs, how many second requests went to the worker of the first."""

    asked: int
    same: int

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self.same / self.asked


class Prompts:
    """Prompts of random words; equal seeds give equal prompts."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def text(self, characters: int = 1500) -> str:
        """A prompt that shares no prefix with another."""
        letters = string.ascii_lowercase + "   "
        return "".join(self._random.choice(letters) for _ in range(characters))


def chat(prompt: str, salt: str | None = None, shared: str = "") -> dict[str, Any]:
    """A chat completion of one message, after a `shared` system message where there is one."""
    system = [{"role": "system", "content": shared}] if shared else []
    body: dict[str, Any] = {"model": "toy", "messages": [*system, {"role": "user", "content": prompt}]}
    return body | {"max_tokens": 1} | ({} if salt is None else {"cache_salt": salt})


def carrier(router: Router) -> Carrier:
    """Which headers and fields reach a worker."""
    router.recorded()
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "a", "extra": 1}]},
        {"role": "user", "content": "h\u00e9llo  world"},
    ]
    sent = {"model": "toy", "messages": messages, "max_tokens": 4, "top_p": 0.1, "seed": 7, **FIELDS}
    answer = router.ask(sent, HEADERS)
    arrived = next(each for each in router.recorded() if not each.path.endswith("/render"))
    got = json.loads(arrived.body)
    headers = tuple(name for name, value in HEADERS.items() if arrived.header(name) == value)
    fields = tuple(name for name, value in FIELDS.items() if got.get(name) == value)
    return Carrier(
        headers=headers,
        headers_lost=tuple(name for name in HEADERS if name not in headers),
        fields=fields,
        fields_lost=tuple(name for name in FIELDS if name not in fields),
        authorization=arrived.header("authorization") == f"Bearer {router.credentials['a']}",
        same_bytes=arrived.body == json.dumps(sent, separators=(",", ":"), ensure_ascii=False),
        added=tuple(sorted(got.keys() - sent.keys())),
        changed=tuple(sorted(name for name in sent.keys() - FIELDS.keys() if got.get(name) != sent[name])),
        response_headers=tuple(sorted(set(answer.headers) - _PLAIN_RESPONSE)),
    )


_PLAIN_RESPONSE: Final = {"content-type", "content-length", "date", "server", "vary", "transfer-encoding"}


def retries(router: Router) -> Retries:
    """What follows where every worker answers 503 once."""
    router.recorded()
    router.fail(1)
    answer = router.ask(chat("a prompt whose workers are busy " * 20))
    router.fail(0)
    seen = [each for each in router.recorded() if not each.path.endswith("/render")]
    return Retries(len(seen), len({each.worker for each in seen}), answer.status)


def renders(router: Router) -> Renders:
    """Which workers are asked to render a prompt that one of them is to answer."""
    router.recorded()
    phrase = "a phrase that only this prompt has"
    router.ask(chat(phrase * 20))
    seen = [each for each in router.recorded() if each.path.endswith("/render")]
    return Renders(
        len(seen),
        len({each.worker for each in seen}),
        any(each.header("authorization") == f"Bearer {router.credentials['a']}" for each in seen),
        any(phrase in each.body for each in seen),
    )


def residue(router: Router, seconds: int = 20, between: int = 60) -> Residue:
    """Copies of a prompt's phrase that the router's process still has, `seconds` and `between` requests later."""
    phrase = f"phrase-of-one-person-{random.Random(time.time_ns()).getrandbits(64):016x}-"
    router.ask(chat(phrase * 30, "namespace-epoch-1"))
    at_once, other = copies_in_memory(router.process, phrase), Prompts(3)
    for _ in range(between):
        router.ask(chat(other.text(), "namespace-epoch-2"))
    time.sleep(seconds)
    return Residue(at_once, copies_in_memory(router.process, phrase), seconds, between)


def copies_in_memory(process: int, phrase: str) -> int:
    """How often a phrase stands in the writable memory of a process of the same user."""
    wanted, count = phrase.encode(), 0
    with Path(f"/proc/{process}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{process}/maps").read_text().splitlines():
            span, flags = line.split()[:2]
            begin, end = (int(text, 16) for text in span.split("-"))
            if flags[:2] != "rw" or end - begin > 1 << 30:
                continue
            try:
                memory.seek(begin)
                count += memory.read(end - begin).count(wanted)
            except (OSError, ValueError):
                continue
    return count


class Sender(NamedTuple):
    """Who sends a request: the tenant whose credential it carries, its subject, and the salt that its body states."""

    tenant: str
    salt: str | None
    subject: str = "s"


class Pairing(NamedTuple):
    """Two requests, and what they share: `prompt` all of it, `segment` a long system message, `nothing`."""

    first: Sender
    second: Sender
    shared: str = "prompt"


A, B, UNSALTED = Sender("a", "salt-a"), Sender("b", "salt-b"), None
PLACEMENTS: Final = {
    "own prompt": Pairing(A, A),
    "segment across subjects": Pairing(Sender("a", "salt-a1", "s1"), Sender("a", "salt-a2", "s2"), "segment"),
    "prompt of another subject": Pairing(Sender("a", "salt-a1", "s1"), Sender("a", "salt-a2", "s2")),
    "foreign tenant, own salt": Pairing(A, B),
    "foreign tenant, no salt": Pairing(Sender("a", UNSALTED), Sender("b", UNSALTED)),
    "foreign tenant, forged salt": Pairing(A, Sender("b", A.salt)),
    "control": Pairing(A, A, "nothing"),
}


def placement(router: Router, pairing: Pairing, pairs: int, seed: int) -> Placement:
    """How often the second request of a pair goes to the worker of the first.

    Up to three unrelated requests are under way while each is asked: some routers send everything to the first of
    workers that are equally loaded.
    """
    prompts, chance, same = Prompts(seed), random.Random(seed), 0

    def load(pool: ThreadPoolExecutor) -> None:
        for _ in range(chance.randrange(4)):
            pool.submit(router.ask, chat(prompts.text(), "salt-z") | {"max_tokens": SLOW_TOKENS})
        time.sleep(0.01)

    for _ in range(pairs):
        shared, first, second = (prompts.text() for _ in range(3))
        with ThreadPoolExecutor(8) as pool:
            load(pool)
            worker = _send(router, pairing.first, pairing.shared, shared, first)
        with ThreadPoolExecutor(8) as pool:
            load(pool)
            same += bool(worker) and _send(router, pairing.second, pairing.shared, shared, second) == worker
    return Placement(pairs, same)


def _send(router: Router, sender: Sender, shares: str, shared: str, own: str) -> str:
    """Send one request of a pair; the worker that answered."""
    body = {
        "prompt": lambda: chat(shared, sender.salt),
        "segment": lambda: chat(own[:100], sender.salt, shared),
        "nothing": lambda: chat(own, sender.salt),
    }[shares]()
    return router.ask(body, {"x-kvcustody-subject": sender.subject}, tenant=sender.tenant).worker


def is_void(found: Placement, workers: int) -> bool:
    """Whether a control lies so far from 1/W that the router does not spread unrelated prompts."""
    return abs(found.share - 1 / workers) > CONTROL_MARGIN
