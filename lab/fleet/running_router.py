"""A router's own program over stand-in workers that hold their answers, so that it sees the modelled load.

    with RunningRouter("smg", program, workers=8, log_folder=folder) as router:
        router.place("name", [1, 2, 3], [])      # which worker the program chose
        router.ended(0, 0)                       # the request that worker 0 has had longest is answered

1. Each worker is a port of this process. It answers questions about itself at once, and a completion when the model
   says that it ended. So the program counts as many requests at a worker as the model does.
2. The program reads the name as `cache_salt`, and blocks as text: equal blocks are equal text.
3. Only the program's own clock is another one: what it lets go by age, it lets go too late.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import signal
import threading
from collections import deque
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar

import orjson

from kvcustody.errors import ConfigError
from kvcustody.lab.fleet.fleet_model import Placing
from kvcustody.lab.fleet.local_processes import LocalProcesses, free_ports
from kvcustody.lab.fleet.router_programs import router_command

T = TypeVar("T")
BLOCK_CHARACTERS: Final = 24
_CHAT, _RENDER = "/v1/chat/completions", "/v1/chat/completions/render"
_START_SECONDS, _PLACE_SECONDS = 120.0, 30.0
_BODY_BYTES_MAX = 1 << 26
_FILES_EACH = 4  # of a request under way: both ends of two connections
_INFO: Final = {
    "model_path": "toy",
    "served_model_name": "toy",
    "model_id": "toy",
    "version": "0",
    "status": "ok",
}
_MODELS: Final = {
    "object": "list",
    "data": [{"id": "toy", "object": "model", "owned_by": "test", "root": "toy", "max_model_len": 1 << 20}],
}
_ANSWER: Final = {
    "id": "c1",
    "object": "chat.completion",
    "created": 1,
    "model": "toy",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "-"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}


class RunningRouter(Placing):
    """A running program as a router. Raises `ConfigError` when it does not start, or places no request."""

    def __init__(self, name: str, program: Path, *, workers: int, log_folder: Path) -> None:
        self._name, self._program, self._workers = name, program, workers
        self._processes = LocalProcesses(log_folder)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="toy-workers", daemon=True)
        self._servers: list[asyncio.Server] = []
        self._held: list[deque[asyncio.Future[None]]] = [deque() for _ in range(workers)]
        self._arrived: dict[str, asyncio.Future[int]] = {}
        self._asked = [False] * workers  # whether the program has asked each worker anything
        self._sending: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count()
        self._port = self._process = 0

    def __enter__(self) -> RunningRouter:
        _allow_files(self._workers)
        self._thread.start()
        try:
            ports = free_ports(self._workers + 2)
            self._port, metrics_port, *behind = ports
            self._run(self._serve(behind))
            urls = [f"http://127.0.0.1:{port}" for port in behind]
            command = router_command(self._name, self._program, urls, port=self._port, metrics_port=metrics_port)
            self._process = self._processes.start(self._name, command)
            self._processes.wait_for(self._name, f"http://127.0.0.1:{self._port}/health", seconds=_START_SECONDS)
            self._run(self._wait_until_known())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def place(self, name: str, blocks: Sequence[int], loads: Sequence[int]) -> int:
        """Return the worker to which the program sent the request; the program tracks loads itself."""
        return self._run(self._place(name, blocks))

    def ended(self, worker: int, number: int) -> None:
        """Answer the worker's oldest request: which one it is does not change the worker's load."""
        self._loop.call_soon_threadsafe(self._answer, worker)

    def close(self) -> None:
        """Answer all held requests, then end the program, then the workers."""
        if self._thread.is_alive():
            self._run(self._answer_all())
        with suppress(ProcessLookupError):
            if self._process:  # it keeps nothing that an orderly end would save
                os.kill(self._process, signal.SIGKILL)
        self._processes.close()
        if self._thread.is_alive():
            self._run(self._stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    # -- the loop's side ----------------------------------------------------------------------------------------------

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _serve(self, ports: Sequence[int]) -> None:
        for worker, port in enumerate(ports):

            async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, worker: int = worker) -> None:
                await self._handle(worker, reader, writer)

            self._servers.append(await asyncio.start_server(handle, "127.0.0.1", port))

    async def _wait_until_known(self) -> None:
        """Wait until the program has queried every worker and forwards requests."""
        until = self._loop.time() + _START_SECONDS
        while not all(self._asked):
            if self._loop.time() > until:
                missing = self._asked.count(False)
                raise ConfigError(f"`{self._name}` did not ask {missing} of its workers about themselves")
            await asyncio.sleep(0.05)
        while True:
            try:
                worker = await self._place("a first request", [0], seconds=1.0)
            except ConfigError:
                if self._loop.time() > until:
                    raise
                continue
            self._answer(worker)
            return

    async def _place(self, name: str, blocks: Sequence[int], *, seconds: float = _PLACE_SECONDS) -> int:
        number = f"r{next(self._numbers)}"
        arrived = self._arrived[number] = self._loop.create_future()
        text = "".join(f"{block:0{BLOCK_CHARACTERS}x}" for block in blocks)
        message = {"role": "user", "content": text}
        body = orjson.dumps({"model": "toy", "messages": [message], "max_tokens": 1, "cache_salt": name})
        sending = self._loop.create_task(self._send(number, body))
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)
        try:
            return await asyncio.wait_for(asyncio.shield(arrived), seconds)
        except TimeoutError:
            raise ConfigError(f"`{self._name}` sent a request to no worker within {seconds:g} s") from None
        finally:
            self._arrived.pop(number, None)

    async def _send(self, number: str, body: bytes) -> None:
        """Send one request to the program, and ignore its answer."""
        with suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            head = (
                f"POST {_CHAT} HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nx-request-id: {number}\r\nconnection: close\r\n\r\n"
            )
            writer.write(head.encode() + body)
            try:
                await writer.drain()
                while await reader.read(1 << 16):
                    pass
            finally:
                writer.close()

    async def _handle(self, worker: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the requests of one connection from the program."""
        with suppress(OSError, asyncio.IncompleteReadError, ValueError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                headers = {
                    name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])
                }
                size = int(headers.get("content-length", "0"))
                if size > _BODY_BYTES_MAX:
                    break
                body = await reader.readexactly(size)
                self._asked[worker] = True
                writer.write(await self._answered(worker, head[0].split(" ")[1], headers, body))
                await writer.drain()
        writer.close()

    async def _answered(self, worker: int, path: str, headers: dict[str, str], body: bytes) -> bytes:
        if path == _CHAT:
            arrived = self._arrived.get(headers.get("x-request-id", ""))
            if arrived is not None and not arrived.done():
                held = self._loop.create_future()
                self._held[worker].append(held)
                arrived.set_result(worker)
                await held
            return _response(_ANSWER)
        if path == _RENDER:
            text = "".join(str(message["content"]) for message in orjson.loads(body).get("messages", []))
            return _response({"request_id": "r", "token_ids": [*text.encode()], "model": "toy", "sampling_params": {}})
        return _response(_MODELS if path == "/v1/models" else _INFO)

    def _answer(self, worker: int) -> None:
        if self._held[worker]:
            held = self._held[worker].popleft()
            if not held.done():
                held.set_result(None)

    async def _answer_all(self) -> None:
        for worker, held in enumerate(self._held):
            while held:
                self._answer(worker)

    async def _stop(self) -> None:
        for server in self._servers:
            server.close()
        await self._answer_all()
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


def _response(document: object) -> bytes:
    body = orjson.dumps(document)
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _allow_files(workers: int) -> None:
    """Raise the limit of open files as far as the system allows: each running request needs some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(soft, min(hard, 1 << 16)) if hard != resource.RLIM_INFINITY else 1 << 16
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    if wanted < _FILES_EACH * workers:
        raise ConfigError(f"{workers} workers need more open files than the system allows, {wanted}")
