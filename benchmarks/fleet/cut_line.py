"""A line between two processes that can be cut: bytes stop both ways, open connections stay, new ones get no answer."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable

Open = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


def place_opener(place: str) -> Open:
    """Connects to `HOST:PORT`, or to a Unix socket where the place is a path."""
    if place.startswith("/"):
        return lambda: asyncio.open_unix_connection(place)
    host, _, port = place.rpartition(":")
    return lambda: asyncio.open_connection(host, int(port))


class CutLine:
    """Listens at one place for the other; on a thread of its own until `close`."""

    def __init__(self, listen: str, to: str) -> None:
        self._listen, self._open = listen, place_opener(to)
        self._loop = asyncio.new_event_loop()
        self._whole = asyncio.Event()
        self._whole.set()
        self._over = asyncio.Event()
        began = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(began,), daemon=True)
        self._thread.start()
        if not began.wait(30):
            raise RuntimeError(f"nothing listens at {listen}")

    def cut(self) -> None:
        """From now on nothing passes."""
        self._loop.call_soon_threadsafe(self._whole.clear)

    def heal(self) -> None:
        """What waited passes, and so does what comes."""
        self._loop.call_soon_threadsafe(self._whole.set)

    def close(self) -> None:
        """End every connection."""
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(10)

    def _run(self, began: threading.Event) -> None:
        self._loop.run_until_complete(self._serve(began))
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.05))
        self._loop.close()

    async def _serve(self, began: threading.Event) -> None:
        if self._listen.startswith("/"):
            server = await asyncio.start_unix_server(self._connected, self._listen)
        else:
            host, _, port = self._listen.rpartition(":")
            server = await asyncio.start_server(self._connected, host, int(port))
        began.set()
        await self._over.wait()
        server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._whole.wait()
            there, back = await self._open()
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._pump(reader, back), self._pump(there, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._whole.wait()
                writer.write(data)
                await writer.drain()
        with contextlib.suppress(OSError):
            writer.close()
