"""What does a router give one tenant of another's, and what does it keep?

    python routers.py placement-oracle smg          # needs: smg, or vllm-router

Workers without a model record what reaches them. All is on loopback. Requests about placement come in pairs, with a
control of unrelated prompts: one outside 1/2 +- 0.2 says that the router does not spread its load, and voids the case.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import socket
import string
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

CHAT = "/v1/chat/completions"
PAIRS = 40
START_SECONDS = 90
SLOW_TOKENS, SLOW_SECONDS = 2, 0.06
WAIT_SECONDS, BETWEEN = 10, 40
_INFO = {"model_path": "toy", "served_model_name": "toy", "model_id": "toy", "version": "0", "status": "ok"}
_MODEL = {"id": "toy", "object": "model", "owned_by": "test", "root": "toy", "max_model_len": 4096}


# Starts what stands before a router, of a starter, a folder, the router's URL and two ports; headers of clients.
Before = Callable[[Callable[..., int], Path, str, list[int]], dict[str, dict[str, str]]]


class RecorderServer:
    """An OpenAI-compatible server that states its name."""

    def __init__(self, name: str) -> None:
        worker = self
        self.name = name
        self.bodies: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                """Log nothing."""

            def _send(self, body: object) -> None:
                data = json.dumps(body).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                """Answer routers' questions about a worker."""
                models = {"object": "list", "data": [_MODEL]}
                self._send(models if self.path == "/v1/models" else _INFO)

            def do_POST(self) -> None:
                """Answer a completion, or a prompt's tokens."""
                text = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
                body = json.loads(text or "{}")
                if self.path.endswith("/render"):
                    said = "".join(str(each["content"]) for each in body.get("messages", []))
                    tokens = [ord(character) for character in said]
                    rendered = {"request_id": "r", "token_ids": tokens, "model": "toy"}
                    self._send({**rendered, "sampling_params": {}, "features": None})
                    return
                worker.bodies.append(text)
                if body.get("max_tokens") == SLOW_TOKENS:
                    time.sleep(SLOW_SECONDS)
                message = {"role": "assistant", "content": worker.name}
                self._send(
                    {
                        "id": "c1",
                        "object": "chat.completion",
                        "created": 1,
                        "model": "toy",
                        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
                    }
                )

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()


class HttpAnswer:
    """Status, body and headers of an answer; status 0 where nothing answered."""

    def __init__(self, status: int, body: str = "", headers: Mapping[str, str] | None = None) -> None:
        self.status, self.body = status, body
        self.headers = {name.lower(): value for name, value in (headers or {}).items()}

    @property
    def worker(self) -> str:
        """The worker that answered."""
        return str(json.loads(self.body)["choices"][0]["message"]["content"]) if self.status == 200 else ""


def call(url: str, body: object = None, headers: Mapping[str, str] | None = None) -> HttpAnswer:
    """Send a request, by POST where there is a body."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310 - loopback
            return HttpAnswer(answer.status, answer.read().decode(errors="replace"), dict(answer.headers))
    except urllib.error.HTTPError as refused:
        return HttpAnswer(refused.code, refused.read().decode(errors="replace"), dict(refused.headers))
    except OSError:
        return HttpAnswer(0)


class RoutedWorkers:
    """A running router, by the address that clients use."""

    def __init__(
        self,
        url: str,
        keys: Mapping[str, dict[str, str]],
        process: int,
        log: Path,
        metrics: str,
        workers: list[RecorderServer],
    ) -> None:
        self.url, self.keys, self.process, self.log, self.metrics = url, keys, process, log, metrics
        self.workers = workers

    def ask(
        self,
        tenant: str,
        prompt: str,
        salt: str | None = None,
        *,
        tokens: int = 1,
        headers: Mapping[str, str] | None = None,
    ) -> HttpAnswer:
        """Return one chat completion for a tenant."""
        body: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": prompt}]}
        body |= {"max_tokens": tokens} | ({} if salt is None else {"cache_salt": salt})
        given = {**self.keys[tenant], **(headers or {})}
        return call(self.url + CHAT, body, given)


@contextlib.contextmanager
def running(name: str, before: Before | None = None) -> Iterator[RoutedWorkers]:
    """Yield the router over two workers, behind what `before` starts.

    Raises:
        RuntimeError: it does not start.
    """
    beside = Path(sys.executable).with_name(name)
    program = str(beside) if beside.exists() else shutil.which(name)
    if program is None:
        raise RuntimeError(f"`{name}` is not on PATH")
    workers = [RecorderServer("w1"), RecorderServer("w2")]
    ports = _free_ports(4)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        log = folder / "router.log"

        def start(command: list[str], environment: Mapping[str, str] | None = None) -> int:
            out = stack.enter_context(log.open("ab"))
            process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)  # noqa: S603
            stack.callback(_end, process)
            return process.pid

        words = ["launch"] if name == "smg" else []
        words += ["--worker-urls", *(worker.url for worker in workers), "--policy", "cache_aware"]
        words += ["--host", "127.0.0.1", "--port", str(ports[0])]
        words += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(ports[1])]
        process = start([program, *words])
        url = f"http://127.0.0.1:{ports[0]}"
        keys = {tenant: {"authorization": "Bearer a-credential"} for tenant in "ab"}
        _wait(lambda: call(f"{url}/v1/models").status == 200, log)
        if before is not None:
            keys = before(start, folder, url, ports[2:])
            url = f"http://127.0.0.1:{ports[2]}"
            _wait(lambda: call(f"http://127.0.0.1:{ports[3]}/ready").status == 200, log)
        made = RoutedWorkers(url, keys, process, log, f"http://127.0.0.1:{ports[1]}/metrics", workers)
        _wait(lambda: made.ask("a", "the first request").status == 200, log)
        yield made


class RandomPrompts:
    """Random text: no two share a prefix."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - prompts are no secrets

    def text(self) -> str:
        """Return one prompt."""
        letters = string.ascii_lowercase + "   "
        return "".join(self._random.choice(letters) for _ in range(1500))


def together(
    fleet: RoutedWorkers,
    first: Callable[[str], HttpAnswer],
    second: Callable[[str], HttpAnswer],
    *,
    same: bool,
) -> int:
    """Return for how many of `PAIRS` pairs the second request went to the first one's worker.

    Up to three others are under way meanwhile: routers send everything to the first of equally loaded workers.
    """
    prompts, chance, count = RandomPrompts(7 + same), random.Random(3), 0  # noqa: S311
    with ThreadPoolExecutor(8) as pool:

        def load() -> None:
            for _ in range(chance.randrange(4)):
                pool.submit(fleet.ask, "a", prompts.text(), "salt-z", tokens=SLOW_TOKENS)
            time.sleep(0.01)

        for _ in range(PAIRS):
            prompt = prompts.text()
            load()
            worker = answered(first(prompt)).worker
            time.sleep(SLOW_SECONDS)
            load()
            other = answered(second(prompt if same else prompts.text()))
            count += bool(worker) and other.worker == worker
            time.sleep(SLOW_SECONDS)
    return count


def answered(answer: HttpAnswer) -> HttpAnswer:
    """Return the same, where the router or a worker answered at all; a refusal counts as an answer."""
    if not answer.status or answer.status == 401 or answer.status >= 500:
        raise RuntimeError(f"void: a request was answered with {answer.status or 'nothing'}")
    return answer


def _placed(fleet: RoutedWorkers, first: str | None, second: str | None) -> tuple[bool, str]:
    """Return whether another tenant's prompt goes to the worker that computed it, with the control."""
    foreign = together(fleet, lambda p: fleet.ask("a", p, first), lambda p: fleet.ask("b", p, second), same=True)
    own = together(fleet, lambda p: fleet.ask("a", p, first), lambda p: fleet.ask("a", p, first), same=True)
    control = together(fleet, lambda p: fleet.ask("a", p, first), lambda p: fleet.ask("a", p, first), same=False)
    if abs(control / PAIRS - 0.5) > 0.2 or own < 0.9 * PAIRS:
        raise RuntimeError(f"void: control {control} and own prompt {own} of {PAIRS}")
    said = f"another tenant's prompt went where it had been asked {foreign} of {PAIRS} times"
    return foreign > control + 0.25 * PAIRS, f"{said} (unrelated prompts {control}, own {own})"


def placement_oracle(fleet: RoutedWorkers) -> tuple[bool, str]:
    """Try the attack without any salt."""
    return _placed(fleet, None, None)


def forged_salt(fleet: RoutedWorkers) -> tuple[bool, str]:
    """Try the attack with the first tenant's salt in the second tenant's request."""
    return _placed(fleet, "salt-a", "salt-a")


def chosen_worker(fleet: RoutedWorkers) -> tuple[bool, str]:
    """Try headers by which a client names a worker, or a key that stands for one."""
    prompts = RandomPrompts(11)
    for header in ("x-smg-target-worker", "x-smg-routing-key", "x-session-id"):
        values = ["0", "1"] if header == "x-smg-target-worker" else ["key-1", "key-2"]
        seen = []
        for value in values:
            asked = [answered(fleet.ask("a", prompts.text(), None, headers={header: value})).worker for _ in range(16)]
            seen.append(set(asked) - {""})
        if all(len(each) == 1 for each in seen) and seen[0] != seen[1]:
            return True, f"`{header}` chose the worker of 32 requests"
    names = [name for name in answered(fleet.ask("a", prompts.text())).headers if "worker" in name]
    if names:
        return True, f"the answer names its worker in `{names[0]}`"
    return False, "no header of a client chose a worker, and no answer named one"


def kept_phrase(fleet: RoutedWorkers) -> tuple[bool, str]:
    """Look for a phrase that nobody requests again in the router's memory, log and metrics."""
    phrase = f"phrase-of-one-person-{time.time_ns():x}-"
    answered(fleet.ask("a", phrase * 30, "salt-a"))
    if not any(phrase in body for worker in fleet.workers for body in worker.bodies):
        raise RuntimeError("void: the phrase reached no worker")
    prompts = RandomPrompts(13)
    for _ in range(BETWEEN):
        fleet.ask("a", prompts.text(), "salt-b")
    time.sleep(WAIT_SECONDS)
    copies = copies_in_memory(fleet.process, phrase)
    places = [
        name
        for name, text in (
            ("log", fleet.log.read_text(errors="replace")),
            ("metrics", call(fleet.metrics).body),
        )
        if phrase in text
    ]
    where = f"{copies} copies in its memory {WAIT_SECONDS} s and {BETWEEN} requests later"
    also = f", and in its {' and '.join(places)}" if places else ", none in its log and metrics"
    return bool(copies or places), where + also


def open_administration(fleet: RoutedWorkers) -> tuple[bool, str]:
    """Try, without credentials, to list workers and their loads, and to add a worker."""
    stranger = RecorderServer("stranger")
    for path in ("/workers", "/list_workers", "/get_loads"):
        told = call(fleet.url + path)
        if not told.status:
            raise RuntimeError(f"void: {path} was not answered")
        if told.status == 200 and any(worker.url in told.body for worker in fleet.workers):
            added = [
                call(fleet.url + "/workers", {"url": stranger.url}),
                call(f"{fleet.url}/add_worker?url={stranger.url}", {}),
            ]
            prompts, until = RandomPrompts(17), time.monotonic() + 15
            while any(one.status in (200, 201, 202) for one in added) and time.monotonic() < until:
                fleet.ask("a", prompts.text())
                if stranger.bodies:
                    return (
                        True,
                        f"whoever asks `{path}` is told the workers, and adds one that gets tenants' prompts",
                    )
            return True, f"whoever asks `{path}` is told the addresses of workers"
    return False, "nobody without a credential was told workers"


def copies_in_memory(process: int, phrase: str) -> int:
    """Return how often a phrase occurs in the writable memory of a process of the same user."""
    wanted, count = phrase.encode(), 0
    with Path(f"/proc/{process}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{process}/maps").read_text().splitlines():
            span, flags = line.split()[:2]
            begin, end = (int(text, 16) for text in span.split("-"))
            if flags[:2] != "rw" or end - begin > 1 << 30:
                continue
            with contextlib.suppress(OSError, ValueError):
                memory.seek(begin)
                count += memory.read(end - begin).count(wanted)
    return count


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def _wait(until: Callable[[], bool], log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while not until():
        if time.monotonic() > end:
            raise RuntimeError(f"does not start: {log.read_text(errors='replace')[-300:]}")
        time.sleep(0.2)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


CASES = {
    "placement-oracle": placement_oracle,
    "forged-salt": forged_salt,
    "chosen-worker": chosen_worker,
    "kept-phrase": kept_phrase,
    "open-administration": open_administration,
}


def main(case: str, router: str, before: Before | None = None) -> dict[str, Any]:
    """Return what was seen."""
    with running(router, before) as fleet:
        found, evidence = CASES[case](fleet)
    return {"found": found, "evidence": evidence}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2])))
