"""Dynamo's `SelectionService` as a router of `fleet_model`, in a process of Dynamo's own environment.

    with DynamoRouter(python, workers=8, blocks_max=20_000) as router:
        router.place("name", [1, 2, 3], [])

1. It knows blocks by the events that workers tell under names, and load by what is booked: a request's prompt until its
   first token, its blocks until its end. Before each question it has read all events.
2. A block has one hash at every worker: the service loses what a worker adds to a chain that another one has under
   other hashes.
3. A block of a trace is one of its blocks, of 16 tokens, however many the trace has: shares are the same.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Hashable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

from kvcustody.errors import ConfigError
from kvcustody.lab.fleet.fleet_model import CacheChange, Placing

_END_SECONDS = 20.0


class DynamoRouter(Placing):
    """The router. Raises `ConfigError` when the service does not start, or ends."""

    def __init__(self, python: Path, *, workers: int, blocks_max: int) -> None:
        """Prepare the process. `python`: an interpreter whose environment has ai-dynamo-runtime, pyzmq and msgspec."""
        script = Path(__file__).with_name("dynamo_selector.py")
        self._command = [str(python), str(script), str(workers), str(blocks_max)]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the router
        self._process: subprocess.Popen[bytes] | None = None
        self._selections: list[str] = []
        self._keys: dict[tuple[Hashable, int], int] = {}  # hashes of blocks in events, the same at each worker
        self._held: list[set[int]] = [set() for _ in range(workers)]

    def __enter__(self) -> DynamoRouter:
        try:
            self._process = subprocess.Popen(  # noqa: S603 - the environment that the user names
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env={**os.environ, "DYN_LOG": "error"},
            )
        except OSError as error:
            self._log.close()
            raise ConfigError(f"Dynamo does not start: {self._command[0]}: {error.strerror}") from None
        try:
            self._answer()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def place(self, name: str, blocks: Sequence[int], loads: Sequence[int]) -> int:
        """Return the worker that the service selects; the service tracks loads itself (rule 1)."""
        self._say({"place": name, "blocks": [*blocks]})
        answer = self._answer()
        self._selections.append(answer["selection"])
        return int(answer["worker"])

    def took(self, worker: int, name: str, change: CacheChange) -> None:
        """Publish the blocks that a worker stored for a request, and those that it evicted for them."""
        held = self._held[worker]
        gone = [key for key in (self._keys.get(one) for one in change.gone) if key in held]
        if gone:
            held.difference_update(gone)
            self._say({"removed": worker, "keys": gone})
        keys = [self._keys.setdefault((change.owner, block), len(self._keys) + 1) for block in change.blocks]
        known = next((place for place, key in enumerate(keys) if key not in held), len(keys))
        held.update(keys)
        if known < len(keys):
            self._say({"stored": worker, "name": name, "blocks": [*change.blocks], "keys": keys, "known": known})

    def first_token(self, number: int) -> None:
        """Report that the prompt is computed."""
        self._say({"prefilled": self._selections[number]})

    def ended(self, worker: int, number: int) -> None:
        """Report that the request ended."""
        self._say({"ended": self._selections[number]})

    def close(self) -> None:
        """End the service; a second call does nothing."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.close()
            process.wait(_END_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            process.kill()
            process.wait()
        process.stdout.close()
        self._log.close()

    def _say(self, document: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(orjson.dumps(document) + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise ConfigError(f"Dynamo has ended: {self._last_words()}") from None

    def _answer(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ConfigError(f"Dynamo has ended: {self._last_words()}")
        answer: dict[str, Any] = orjson.loads(line)
        return answer

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        return " ".join(([line for line in lines if line.strip()] or ["it said nothing"])[-1].split())[-400:]
