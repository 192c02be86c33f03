"""What the door adds to a request: Envoy alone, Envoy with the door, and the door as a reverse proxy, in turns.

    python benchmarks/fleet/door_latency.py
    python benchmarks/fleet/door_latency.py --only 64k --rounds 7 --json benchmarks/results/door-cpu.json

1. Requests come at a fixed rate, whether earlier ones are answered or not: a late answer counts from when its request
   was due. Behind each way stands the same server, which reads the body and answers at once.
2. Ways take turns, round by round; a way's figure is the median over rounds of that round's percentile. Added is the
   difference to Envoy alone.
3. The generator's own processor time is stated: where it is near one core, it is what was measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from kvcustody.governance.credentials.api_key_file import add_key
from kvcustody.integrations.door.envoy_configuration import ListenPlace, envoy_configuration

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from bench import Bench

ROOT = Path(__file__).resolve().parents[2]
BODY_MAX = 4 << 20
CONNECTIONS = 64
TOKENS_RATE = 20.0  # a MiB of token ids takes a core some 15 ms to read: 200 a second are more than one door's
UPSTREAM = """
async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})
"""


def bodies() -> dict[str, bytes]:
    """Bodies by name: text of 2 KiB, 64 KiB and 1 MiB, and 1 MiB of token ids."""
    chance = random.Random(5)

    def text(size: int) -> bytes:
        words = "".join(chance.choice("abcdefghijklmnop  ") for _ in range(size))
        return json.dumps({"model": "toy", "prompt": words, "max_tokens": 1}).encode()

    tokens = [chance.randrange(100_000) for _ in range((1 << 20) // 7)]
    ids = json.dumps({"model": "toy", "prompt": tokens, "max_tokens": 1}).encode()
    return {"2k": text(2 << 10), "64k": text(64 << 10), "1m-text": text(1 << 20), "1m-tokens": ids}


@contextlib.contextmanager
def ways() -> Iterator[tuple[dict[str, int], str]]:
    """Ports by way, and a client's key; every process ends with the block."""
    made = subprocess.run([ROOT / "benchmarks/routers_env.sh", "envoy"], stdout=subprocess.PIPE, cwd=ROOT, check=False)
    if made.returncode:
        raise SystemExit(made.returncode)
    envoy = ROOT / made.stdout.decode().strip() / "bin/envoy"
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        upstream, plain, governed, door, about, proxy, proxy_about = _free_ports(7)
        (folder / "upstream.py").write_text(UPSTREAM)
        key = add_key(folder / "keys.yaml", {"name": "acme", "tenant": "acme"})
        (folder / "identity.yaml").write_text("schema: kvcustody/identity@1\napi_keys: {path: keys.yaml}\n")
        environment = os.environ | {
            "KVCUSTODY_IDENTITY_PATH": str(folder / "identity.yaml"),
            "KVCUSTODY_SCOPE_TOKEN_KEY_PATH": str(folder / "scope.key"),
            "KVCUSTODY_REQUEST_BYTES_MAX": str(BODY_MAX),
            "KVCUSTODY_LOG_LEVEL": "error",
        }

        def place(port: int) -> ListenPlace:
            return ListenPlace("127.0.0.1", port)

        def start(*command: str | Path) -> None:
            process = subprocess.Popen(command, cwd=folder, env=environment)
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)

        with_door = envoy_configuration(place(governed), place(door), place(upstream), body_bytes_max=BODY_MAX)
        (folder / "governed.yaml").write_text(with_door)
        without = envoy_configuration(place(plain), place(door), place(upstream), body_bytes_max=BODY_MAX)
        (folder / "plain.yaml").write_text(_without_door(without))
        ours = (sys.executable, "-m", "kvcustody.console.main", "door")
        subprocess.run(
            [*ours, "key", "door-1.example"],
            cwd=folder,
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        start(
            sys.executable,
            "-m",
            "uvicorn",
            "upstream:app",
            "--port",
            str(upstream),
            "--log-level",
            "error",
            "--app-dir",
            folder,
        )
        start(*ours, "serve", "--ext-proc", str(place(door)), "--about", str(place(about)))
        router = f"http://{place(upstream)}"
        start(
            *ours,
            "proxy",
            "--listen",
            str(place(proxy)),
            "--router",
            router,
            "--about",
            str(place(proxy_about)),
        )
        for name in ("governed", "plain"):
            start(
                envoy,
                "-c",
                f"{name}.yaml",
                "--log-level",
                "error",
                "--concurrency",
                "1",
                "--use-dynamic-base-id",
            )
        ports = {"envoy": plain, "envoy and door": governed, "door as proxy": proxy}
        for port in ports.values():
            _wait(f"http://{place(port)}/v1/models", key)
        yield ports, key


def _without_door(configuration: str) -> str:
    """The same Envoy without the external processor."""
    import yaml

    parsed = yaml.safe_load(configuration)
    chain = parsed["static_resources"]["listeners"][0]["filter_chains"][0]
    filters = chain["filters"][0]["typed_config"]["http_filters"]
    chain["filters"][0]["typed_config"]["http_filters"] = [one for one in filters if one["name"] == "router"]
    text: str = yaml.safe_dump(parsed)
    return text


def _wait(url: str, key: str) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, headers={"authorization": f"Bearer {key}"}).status_code == 200:
                return
        time.sleep(0.1)
    raise RuntimeError(f"{url} does not answer")


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in held:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in held]


async def ask_at_rate(port: int, key: str, body: bytes, rate: float, seconds: float) -> list[float]:
    """Milliseconds from when each request was due to its answer; raises `RuntimeError` for another status than 200."""
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: edge\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode()
    idle: asyncio.LifoQueue[Any] = asyncio.LifoQueue()
    for _ in range(CONNECTIONS):
        idle.put_nowait(None)
    taken: list[float] = []

    async def one(due: float) -> None:
        held = await idle.get() or await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
        reader, writer = held
        writer.write(head)
        writer.write(body)
        await writer.drain()
        answer = await reader.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(answer.decode("latin-1"))
        await reader.readexactly(2)
        taken.append((time.perf_counter() - due) * 1000)
        idle.put_nowait(held)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for number in range(int(rate * seconds)):
            due = began + number / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.create_task(one(due))
    while not idle.empty():
        held = idle.get_nowait()
        if held is not None:
            held[1].close()
    return sorted(taken)


def main() -> None:
    """Print one JSON object."""
    bench = Bench(__doc__, "grpcio", "uvicorn", "httptools", rounds=5, only="one of: 2k, 64k, 1m-text, 1m-tokens")
    bench.add("--rate", type=float, default=200.0, help="requests a second (default: %(default)s)")
    bench.add("--seconds", type=float, default=5.0, help="a round of one way (default: %(default)s)")
    options = bench.parse()
    figures: dict[str, Any] = {"seconds": options.seconds, "sizes": {}}
    with ways() as (ports, key):
        for size, body in bodies().items():
            if options.only and options.only != size:
                continue
            rate = min(options.rate, TOKENS_RATE) if size == "1m-tokens" else options.rate
            rounds: dict[str, list[tuple[float, float]]] = {way: [] for way in ports}
            used = resource.getrusage(resource.RUSAGE_SELF)
            wall = time.perf_counter()
            for number in range(options.rounds + 1):
                order = list(ports.items())
                for way, port in order[number % 3 :] + order[: number % 3]:
                    times = asyncio.run(ask_at_rate(port, key, body, rate, options.seconds))
                    if number:  # the first round warms
                        rounds[way].append((times[len(times) // 2], times[int(len(times) * 0.99)]))
            after = resource.getrusage(resource.RUSAGE_SELF)
            cores = (after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime) / (time.perf_counter() - wall)
            plain = [median(each[place] for each in rounds["envoy"]) for place in (0, 1)]
            row: dict[str, Any] = {"bytes": len(body), "rate": rate, "generator_cores": round(cores, 2)}
            for way, each in rounds.items():
                p50, p99 = (median(one[place] for one in each) for place in (0, 1))
                row[way] = {"p50_ms": round(p50, 2), "p99_ms": round(p99, 2)}
                if way != "envoy":
                    row[way] |= {
                        "added_p50_ms": round(p50 - plain[0], 2),
                        "added_p99_ms": round(p99 - plain[1], 2),
                    }
            figures["sizes"][size] = row
            print(size, json.dumps(row), file=sys.stderr, flush=True)
    bench.keep(figures, show=True)


if __name__ == "__main__":
    main()
