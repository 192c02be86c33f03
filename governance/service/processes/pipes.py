"""Length-framed messages over the pipes of a child process, with a time limit on every wait.

1. The process knows no setting of the service, and ends with its parent: its standard input does.
"""

from __future__ import annotations

import fcntl
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import IO

PIPE_BYTES = 1 << 20
_SET_PIPE_SIZE = 1031  # fcntl's F_SETPIPE_SZ, Linux alone
_LENGTH = 8


def start_module(module: str, *words: str, more: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a module of ours with these arguments and variables; raises `OSError`."""
    known = {name: value for name, value in os.environ.items() if not name.startswith("KVCUSTODY")}
    process = subprocess.Popen(  # noqa: S603 - our own module
        [sys.executable, "-P", "-m", module, *words],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**known, **(more or {})},
        start_new_session=True,
    )
    _widen(process.stdin, process.stdout)
    return process


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Kill the process, and wait for its end."""
    process.kill()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()
    process.wait()


def _widen(*pipes: IO[bytes] | None) -> None:
    """Room for a batch in the pipes, where the system gives it; no write to them waits for ever."""
    for pipe in pipes:
        assert pipe is not None
        os.set_blocking(pipe.fileno(), False)
        if sys.platform == "linux":
            with suppress(OSError):
                fcntl.fcntl(pipe, _SET_PIPE_SIZE, PIPE_BYTES)


def is_there(process: subprocess.Popen[bytes], wanted: int, seconds: float) -> bool:
    """Whether a process accepts or offers data within some seconds."""
    pipe = process.stdin if wanted == select.POLLOUT else process.stdout
    assert pipe is not None
    poll = select.poll()  # `select` knows the first 1,024 descriptors of a process alone
    poll.register(pipe, wanted)
    return bool(poll.poll(max(0.0, seconds) * 1000))


def send(process: subprocess.Popen[bytes], data: bytes, until: float) -> None:
    """Write to its standard input; raises `TimeoutError` where it does not read in time."""
    assert process.stdin is not None
    left, descriptor = memoryview(data), process.stdin.fileno()
    while left:
        try:
            left = left[os.write(descriptor, left) :]
        except BlockingIOError:
            if not is_there(process, select.POLLOUT, until - time.monotonic()):
                raise TimeoutError("it does not listen") from None


def receive(process: subprocess.Popen[bytes], until: float) -> bytes:
    """Return one answer; raises `TimeoutError` where it is incomplete in time, `EOFError` where the process ended."""
    assert process.stdout is not None
    received, descriptor, wanted = bytearray(), process.stdout.fileno(), _LENGTH
    while len(received) < wanted:
        if not is_there(process, select.POLLIN, until - time.monotonic()):
            raise TimeoutError("it does not answer")
        some = os.read(descriptor, PIPE_BYTES)
        if not some:
            raise EOFError
        received += some
        if len(received) >= _LENGTH:
            wanted = _LENGTH + int.from_bytes(received[:_LENGTH], "little")
    return bytes(received[_LENGTH:])


def length(data: bytes) -> bytes:
    """Return a message's length prefix."""
    return len(data).to_bytes(_LENGTH, "little")


def read_part(file: IO[bytes]) -> bytes:
    """Read the next message, in the child process."""
    length = file.read(_LENGTH)
    data = file.read(int.from_bytes(length, "little"))
    if len(length) < _LENGTH or len(data) < int.from_bytes(length, "little"):
        raise EOFError
    return data
