"""Valid clients while somebody floods: are they refused, and how long do they wait, beside a server that does nothing?

One attack at a time, each from a process of its own, on loopback and so from the valid client's own address: keys that
are wrong, heads that do not end, requests that are begun and never finished, bodies of 64 MiB, connections opened and
closed. Meanwhile a valid client (a process of its own) sends `GET /v1/whoami` with its key at a steady rate and counts
from when each was due; where the server closed an idle connection it opens another. The same flood meets a no-op
server: the same HTTP server and loop, without a limit, that answers every request at once. Reported: answers other than
200, p50 and p99 of both, their ratio, and the most memory that the server's process took.
Run: `python benchmarks/flood.py --json benchmarks/results/flood-cpu.json` [--seconds 10] [--rate 50].
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "harness"))

from bench import Bench

MIB = 1 << 20
HALF_OPEN = 1500
WRONG_CLIENTS = 3
Attack = Callable[[int, str, float], None]
_spawn = multiprocessing.get_context("spawn")


def wrong_keys(port: int, key: str, until: float) -> None:
    """Requests with a key that is wrong in one place, as fast as they are answered."""
    bad = key[:20] + ("0" if key[20] != "0" else "1") + key[21:]
    request = f"GET /v1/whoami HTTP/1.1\r\nHost: kv\r\nAuthorization: Bearer {bad}\r\n\r\n".encode()
    links = [connected(port) for _ in range(WRONG_CLIENTS)]
    while time.monotonic() < until:
        for at, link in enumerate(links):
            try:
                link.sendall(request)
                if not link.recv(65_536):
                    raise ConnectionResetError
            except OSError:
                link.close()
                links[at] = connected(port)


def endless_heads(port: int, key: str, until: float) -> None:
    """One header of 136 MiB, again and again."""
    piece = b"a" * 65_536
    while time.monotonic() < until:
        with connected(port) as link, contextlib.suppress(OSError):
            link.sendall(b"GET /v1/whoami HTTP/1.1\r\nHost: kv\r\nX-A: ")
            for _ in range(136 * MIB // len(piece)):
                link.sendall(piece)
                if time.monotonic() >= until:
                    break


def half_open(port: int, key: str, until: float) -> None:
    """1,500 requests that are begun and never finished, opened anew as they are closed."""
    links: list[socket.socket] = []
    while time.monotonic() < until:
        while len(links) < HALF_OPEN and time.monotonic() < until:
            with contextlib.suppress(OSError):
                link = connected(port)
                link.sendall(b"GET /v1/whoami HTTP/1.1\r\nHost: kv\r\nX-")
                link.setblocking(False)
                links.append(link)
        links = [link for link in links if not is_closed(link)]
        time.sleep(0.05)


def huge_bodies(port: int, key: str, until: float) -> None:
    """Bodies of 64 MiB in chunks, of nobody."""
    head = b"POST /v1/exports HTTP/1.1\r\nHost: kv\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"10000\r\n" + b" " * 65_536 + b"\r\n"
    while time.monotonic() < until:
        with connected(port) as link, contextlib.suppress(OSError):
            link.sendall(head)
            for _ in range(1024):
                link.sendall(chunk)
                if time.monotonic() >= until:
                    break


def openings(port: int, key: str, until: float) -> None:
    """Connections that are opened and closed at once."""
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            connected(port).close()


ATTACKS: dict[str, Attack | None] = {
    "nobody": None,
    "wrong keys": wrong_keys,
    "heads of 136 MiB": endless_heads,
    "half-open requests": half_open,
    "bodies of 64 MiB": huge_bodies,
    "openings": openings,
}


def connected(port: int) -> socket.socket:
    """A connection; raises `OSError` after two seconds."""
    return socket.create_connection(("127.0.0.1", port), timeout=2)


def is_closed(link: socket.socket) -> bool:
    """Whether the server has ended it."""
    try:
        closed = link.recv(4096) == b""
    except BlockingIOError:
        return False
    except OSError:
        closed = True
    if closed:
        link.close()
    return closed


def valid(port: int, key: str, rate: int, seconds: float, pipe: Any) -> None:
    """The valid client: sends (status, milliseconds) of every request, 0 where there was no answer."""

    async def one(due: float, answers: list[tuple[int, float]], idle: list[Any]) -> None:
        request = f"GET /v1/whoami HTTP/1.1\r\nHost: kv\r\nAuthorization: Bearer {key}\r\n\r\n".encode()
        status = 0
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
            async with asyncio.timeout(10):
                while idle and idle[-1][0].at_eof():
                    idle.pop()
                link = idle.pop() if idle else await asyncio.open_connection("127.0.0.1", port)
                reader, writer = link
                writer.write(request)
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.lower().split(b"\r\n")
                size = next(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length"))
                await reader.readexactly(size)
                status = int(head.split(b" ", 2)[1])
                idle.append(link)
        answers.append((status, (time.monotonic() - due) * 1000))

    async def all_of_them() -> list[tuple[int, float]]:
        answers: list[tuple[int, float]] = []
        idle: list[Any] = []
        begun, tasks = time.monotonic(), []
        for number in range(int(rate * seconds)):
            due = begun + number / rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            tasks.append(asyncio.create_task(one(due, answers, idle)))
        await asyncio.gather(*tasks)
        return answers

    pipe.send(asyncio.run(all_of_them()))


def governed(port: int, folder: str, pipe: Any) -> None:
    """The service as `kvcustody serve` runs it; tells its valid key."""
    from kvcustody.governance.api.http.server import serve
    from kvcustody.governance.observability.logs import configure
    from kvcustody.governance.service.access.roles import Role
    from kvcustody.governance.service.service import open_service
    from kvcustody.governance.service.settings import ServiceSettings

    configure("error", "json")
    service = open_service(
        ServiceSettings(
            database_url=f"sqlite:///{folder}/ledger.db",
            state_path=Path(folder) / "state",
            listen=f"127.0.0.1:{port}",
            signing_key_path=Path(folder) / "signing.key",
            console=False,
            log_level="error",
        )
    )
    service.principals.enrol("good", [Role.AUDITOR], by="benchmark")
    key = service.principals.issue_key("good", days=1, by="benchmark").key
    serve(service, ready=lambda: pipe.send(key))


def no_op(port: int, folder: str, pipe: Any) -> None:
    """The same HTTP server and loop; every request is answered at once, and nothing is bounded."""
    import uvicorn

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        headers = [(b"content-length", b"2"), (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}"})

    pipe.send("k" * 64)
    uvicorn.run(answer, host="127.0.0.1", port=port, log_config=None, access_log=False, lifespan="off")


@contextlib.contextmanager
def served(serve: Callable[[int, str, Any], None]) -> Iterator[tuple[int, str, int]]:
    """A server in a process of its own: its port, a valid key, its process."""
    with tempfile.TemporaryDirectory() as folder:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        here, there = _spawn.Pipe()
        process = _spawn.Process(target=serve, args=(port, folder, there))
        process.start()
        try:
            key = here.recv()
            deadline = time.monotonic() + 30
            while True:
                with contextlib.suppress(OSError):
                    connected(port).close()
                    break
                assert time.monotonic() < deadline, "the server did not start"
            yield port, key, process.pid or 0
        finally:
            process.terminate()
            process.join(20)
            if process.is_alive():
                process.kill()


def measured(
    serve: Callable[[int, str, Any], None], attack: Attack | None, rate: int, seconds: float
) -> dict[str, Any]:
    """One attack at one server."""
    with served(serve) as (port, key, process):
        attacker = None
        if attack is not None:
            attacker = _spawn.Process(target=attack, args=(port, key, time.monotonic() + seconds + 3))
            attacker.start()
            time.sleep(1.5)
        here, there = _spawn.Pipe()
        client = _spawn.Process(target=valid, args=(port, key, rate, seconds, there))
        client.start()
        answers = here.recv()
        client.join()
        memory = peak_mib(process)
        if attacker is not None:
            attacker.join(20)
            attacker.kill()
    waits = sorted(wait for _, wait in answers)
    return {
        "requests": len(answers),
        "not_200": sum(status != 200 for status, _ in answers),
        "p50_ms": round(statistics.median(waits), 2),
        "p99_ms": round(waits[int(0.99 * (len(waits) - 1))], 2),
        "peak_mib": memory,
    }


def peak_mib(process: int) -> float:
    """The most memory that a process has had."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    return round(next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024, 1)


def main() -> int:
    """Measure every attack at both servers; 1 where a valid request was refused by the service."""
    bench = Bench(__doc__, "uvicorn", "uvloop", "httptools")
    bench.add("--seconds", type=float, default=10.0, help="how long each flood lasts")
    bench.add("--rate", type=int, default=50, help="valid requests a second")
    chosen = bench.parse()
    os.environ.pop("KVCUSTODY_SERVICE_CONFIG", None)
    rows: dict[str, Any] = {}
    print("| flood | valid requests | not 200 | p50 ms | p99 ms | no-op p99 ms | ratio | peak MiB | no-op MiB |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, attack in ATTACKS.items():
        ours = measured(governed, attack, chosen.rate, chosen.seconds)
        plain = measured(no_op, attack, chosen.rate, chosen.seconds)
        ratio = round(ours["p99_ms"] / plain["p99_ms"], 2)
        rows[name] = {"service": ours, "no_op": plain, "p99_ratio": ratio}
        print(
            f"| {name} | {ours['requests']} | {ours['not_200']} | {ours['p50_ms']} | {ours['p99_ms']} | "
            f"{plain['p99_ms']} | {ratio} | {ours['peak_mib']} | {plain['peak_mib']} |",
            flush=True,
        )
    bench.keep({"floods": rows})
    return int(any(row["service"]["not_200"] for row in rows.values()))


if __name__ == "__main__":
    raise SystemExit(main())
