"""The traffic of `kvcustody demo fleet`: tenants' requests through the doors, and attempts at forbidden access.

1. Requests are those of the generated workload, at their times, as text, without those that no quota has room for.
   Doors are taken in turns.
2. Three attempts are made every `TRY_SECONDS`, and `TrafficFigures` counts their results:
   - a tenant sends a prompt that another tenant has just sent twice, with that tenant's salt;
   - a client goes to a worker past the doors;
   - a client presents an unknown key.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from kvcustody.clock import MICROSECONDS
from kvcustody.console.demo.fleet_processes import MODEL, SESSION, SUBJECT, LocalFleet
from kvcustody.console.up.vllm_model import FIRST_WORD, VOCABULARY
from kvcustody.console.up.vllm_worker import BLOCK_TOKENS, POOL_BLOCKS
from kvcustody.governance.identity.principal import Principal
from kvcustody.http_exchange import read_bounded
from kvcustody.lab.replay.traces.model import TraceRequest
from kvcustody.lab.replay.traces.token_ids import expand
from kvcustody.lab.replay.workload.generator import WorkloadSpec, generate
from kvcustody.lab.replay.workload.tenant_assignment import LabelledPrincipals
from kvcustody.policies.document.model import Policy

AT_ONCE: Final = 8
TRY_SECONDS: Final = 10.0
ANSWER_TOKENS: Final = 16
PROMPT_TOKENS_MAX: Final = 2500
VLLM_PROMPT_TOKENS_MAX: Final = POOL_BLOCKS * BLOCK_TOKENS // 14  # its pool is smaller, and quotas are shares of it
_ANSWER_SECONDS, _ANSWER_BYTES_MAX = 60.0, 1 << 20
_CHAT = "/v1/chat/completions"
_CLASSIFICATION = "X-KVCustody-Classification"
_WORDS = 200


@dataclass(slots=True)
class TrafficFigures:
    """The outcome of the requests. `failures`: by status; 0 is for requests without an answer."""

    answered: int = 0
    failures: Counter[int] = field(default_factory=Counter)
    prompt_tokens: int = 0
    found_tokens: int = 0
    by_door: Counter[str] = field(default_factory=Counter)
    by_worker: Counter[str] = field(default_factory=Counter)
    tries: int = 0
    own_found_tokens: int = 0
    foreign_found_tokens: int = 0
    refused: int = 0
    let_in: int = 0
    keys_replaced: int = 0

    @property
    def failed(self) -> int:
        """The requests of authorised clients that were not answered."""
        return sum(self.failures.values())

    def as_json(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        counters = ("failures", "by_door", "by_worker")
        made: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__ if name not in counters}
        return made | {name: {str(key): n for key, n in getattr(self, name).items()} for name in counters}


class FleetTraffic:
    """Sends requests on its own threads until it is stopped."""

    def __init__(self, fleet: LocalFleet, spec: WorkloadSpec, policy: Policy, *, rolls_after: float = 10.0) -> None:
        """Prepare the traffic. `rolls_after`: seconds after which the first door gets a new key."""
        self._fleet, self._spec = fleet, spec
        self._population = LabelledPrincipals(policy, spec.tenants)
        self._prompts = ModellessPrompts() if fleet.plan.engine_python is None else VllmPrompts(spec.block_tokens)
        self._rolls_after = rolls_after
        self.figures = TrafficFigures()
        self._lock = threading.Lock()
        self._doors = itertools.cycle(fleet.doors.items())
        self._stop = threading.Event()
        targets = (self._serve, self._try_all, self._roll)
        self._threads = [threading.Thread(target=each, name="kvcustody-traffic", daemon=True) for each in targets]
        self._client = httpx.Client(timeout=_ANSWER_SECONDS)

    def start(self) -> None:
        """Start sending requests."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop sending requests and wait for those that run; a second call does nothing."""
        self._stop.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(_ANSWER_SECONDS)
        self._client.close()

    # -- what tenants ask ---------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="kvcustody-client") as pool:
            room = threading.Semaphore(AT_ONCE)
            while not self._stop.is_set():
                began = time.monotonic()
                for number, (request, principal) in enumerate(self._jobs()):
                    if self._stop.wait(max(0.0, began + request.at_us / MICROSECONDS - time.monotonic())):
                        return
                    room.acquire()
                    asked = pool.submit(self._ask, principal, self._prompts.of(request, number))
                    asked.add_done_callback(lambda _: room.release())

    def _jobs(self) -> Iterator[tuple[TraceRequest, Principal]]:
        made = generate(self._spec)
        for request, label in zip(made.requests, made.labels, strict=True):
            is_in_time = request.at_us <= self._spec.span_seconds * MICROSECONDS
            if is_in_time and request.input_tokens <= PROMPT_TOKENS_MAX:
                yield request, self._population.principal(label)

    def _ask(self, principal: Principal, prompt: str, **more: Any) -> int:
        """Send one request through a door; return how many of its tokens were cached, or -1 where it failed."""
        with self._lock:
            name, url = next(self._doors)
        headers = {
            "authorization": f"Bearer {self._fleet.client_keys[str(principal.tenant)]}",
            SUBJECT: str(principal.subject),
            SESSION: str(principal.session),
        }
        if principal.classification is not None:
            headers[_CLASSIFICATION] = str(principal.classification)
        status, body = self._post(url, headers, prompt, more)
        with self._lock:
            figures = self.figures
            if status != 200 or "usage" not in body:
                figures.failures[status] += 1
                return -1
            usage = body["usage"]
            hit_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
            figures.answered += 1
            figures.by_door[name] += 1
            if self._fleet.plan.engine_python is None:  # a worker without a model says its name
                figures.by_worker[str(body["choices"][0]["message"]["content"])] += 1
            figures.prompt_tokens += int(usage["prompt_tokens"])
            figures.found_tokens += hit_tokens
            return hit_tokens

    def _post(self, url: str, headers: dict[str, str], prompt: str, more: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        message = {"role": "user", "content": prompt}
        body = {"model": MODEL, "messages": [message], "max_tokens": ANSWER_TOKENS, **more}
        try:
            request = self._client.build_request("POST", url + _CHAT, json=body, headers=headers)
            answer = read_bounded(self._client, request, deadline_seconds=_ANSWER_SECONDS, bytes_max=_ANSWER_BYTES_MAX)
            return answer.status_code, answer.json() if answer.status_code == 200 else {}
        except (httpx.HTTPError, OSError, ValueError):  # no answer, or none that is one
            return 0, {}

    # -- what people try (rule 2) -------------------------------------------------------------------------------------

    def _try_all(self) -> None:
        number = 0
        while not self._stop.wait(TRY_SECONDS if number else 1.0):
            number += 1
            self._try_foreign(number)
            self._try_to_get_in()

    def _try_foreign(self, number: int) -> None:
        """Repeat a tenant's prompt as the tenant, and then as another tenant with the first one's salt."""
        owner, reader = (_principal(self._population.names[place]) for place in (-1, 0))
        prompt, salt = self._prompts.secret(number), f"salt-{number}"
        self._ask(owner, prompt, cache_salt=salt)
        own = self._ask(owner, prompt, cache_salt=salt)
        foreign = self._ask(reader, prompt, cache_salt=salt)
        if own < 0 or foreign < 0:
            return
        with self._lock:
            self.figures.tries += 1
            self.figures.own_found_tokens += own
            self.figures.foreign_found_tokens += foreign

    def _try_to_get_in(self) -> None:
        """Try to bypass the doors with a client's key, and to pass one with an unknown key."""
        fleet = self._fleet
        key = next(iter(fleet.client_keys.values()))
        places = [(fleet.workers[name], key) for name in fleet.plan.worker_names]
        places.append((next(iter(fleet.doors.values())), "nobodys-key-of-twenty-characters"))
        for url, given in places:
            status, _ = self._post(url, {"authorization": f"Bearer {given}"}, "let me in", {})
            with self._lock:
                self.figures.refused += status == 401
                self.figures.let_in += status == 200

    def _roll(self) -> None:
        """Replace the first door's key once, while requests run."""
        if not self._stop.wait(self._rolls_after):
            done = self._fleet.replace_key(self._fleet.plan.door_names[0], self._stop)
            with self._lock:
                self.figures.keys_replaced += done


def _principal(tenant: str) -> Principal:
    return Principal(issuer="replay", tenant=tenant, subject="somebody", session="one")  # type: ignore[arg-type]


class ModellessPrompts:
    """Prompts for workers without a model, as `lab.fleet.prompt_tokens` reads them."""

    def of(self, request: TraceRequest, number: int) -> str:
        """Return the request's blocks as words, and one word that no other request has."""
        return " ".join([*(f"b{int(block):x}" for block in request.blocks), f"end-{number}"])

    def secret(self, number: int) -> str:
        """Return a prompt that no other request has."""
        return " ".join(f"secret{number}-{word}" for word in range(_WORDS))


class VllmPrompts:
    """Prompts for a model whose vocabulary is numbered words, as long as quotas and its context permit."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens

    def of(self, request: TraceRequest, number: int) -> str:
        """Return the request's tokens, and one unique token at the end."""
        tokens = expand(request.blocks, self._block_tokens)[:VLLM_PROMPT_TOKENS_MAX]
        return " ".join(self._word(int(token)) for token in (*tokens, number))

    def secret(self, number: int) -> str:
        """Return a prompt that no other request has."""
        return " ".join(self._word(7919 * number + word) for word in range(_WORDS))

    @staticmethod
    def _word(token: int) -> str:
        return f"w{token % (VOCABULARY - FIRST_WORD) + FIRST_WORD}"
