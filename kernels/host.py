"""Host memory written piece by piece: one system call zeroes up to 1,024 pieces, on every core that torch may use.

A scattered scrub is thousands of short writes, and a Python call or an indexed fill for each costs as much as
the write. `preadv` from `/dev/zero` takes the whole list of (address, length) pairs instead: the kernel fills
each piece with its own string store, without the GIL, and says how many bytes it wrote.

H1 After `zero_pieces` returns, every byte of every piece is zero and no other byte has changed; it raises
   `DeviceError` where the kernel wrote fewer bytes than asked, so a short write never passes for a scrub.
H2 Where the system call is missing, `available()` is false and the torch path writes instead.
"""

from __future__ import annotations

import ctypes
import functools
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvcustody.errors import DeviceError

PIECES_PER_CALL = 1024  # IOV_MAX of Linux
BYTES_PER_CALL_MAX = 1 << 30  # the kernel moves at most 2 GiB less a page in one call
BYTES_PER_THREAD_MIN = 1 << 20  # less is not worth waking another core


def available() -> bool:
    """Whether this system can write pieces by one call (Linux with `/dev/zero`)."""
    return _zero_source() is not None


def zero_pieces(pieces: NDArray[np.int64]) -> int:
    """Zero every piece of `pieces`, int64 [pieces, 2] of (address, bytes), contiguous; returns the bytes written.

    The caller owns the memory and has checked the addresses. Raises `DeviceError` on a short write.
    """
    total = int(pieces[:, 1].sum())
    if total > BYTES_PER_CALL_MAX:
        pieces = _bounded(pieces)
    shares = min(torch.get_num_threads(), total // BYTES_PER_THREAD_MIN)
    if shares <= 1:
        _write(pieces, total)
        return total
    parts = [part for part in np.array_split(pieces, shares) if len(part)]
    others: list[Future[None]] = [_threads().submit(_write, part) for part in parts[1:]]
    try:
        _write(parts[0])
    finally:  # nobody writes behind the caller's back, whatever failed
        problems = [problem for other in others if (problem := other.exception()) is not None]
    if problems:
        raise problems[0]
    return total


def _bounded(pieces: NDArray[np.int64]) -> NDArray[np.int64]:
    """Pieces longer than one call may move, cut into several."""
    cut = [
        (address + offset, min(BYTES_PER_CALL_MAX, length - offset))
        for address, length in pieces.tolist()
        for offset in range(0, length, BYTES_PER_CALL_MAX)
    ]
    return np.array(cut, dtype=np.int64)


def _write(pieces: NDArray[np.int64], total: int | None = None) -> None:
    """Zero the pieces of one thread, as many a call as the kernel takes."""
    if len(pieces) <= PIECES_PER_CALL and total is not None and total <= BYTES_PER_CALL_MAX:
        _call(pieces, total)
        return
    ends = np.cumsum(pieces[:, 1])
    start, done = 0, 0
    while start < len(pieces):
        fits = int(np.searchsorted(ends, done + BYTES_PER_CALL_MAX, side="right"))
        end = min(max(fits, start + 1), start + PIECES_PER_CALL)
        asked = int(ends[end - 1]) - done
        _call(pieces[start:end], asked)
        start, done = end, done + asked


def _call(pieces: NDArray[np.int64], asked: int) -> None:
    wrote = _preadv()(_zero_source(), pieces.ctypes.data, len(pieces), 0)
    if wrote != asked:
        cause = os.strerror(ctypes.get_errno()) if wrote < 0 else "short write"
        raise DeviceError(
            f"scrub of host memory wrote `{max(wrote, 0)}` of `{asked}` bytes: {cause}",
            asked_bytes=asked,
            wrote_bytes=max(wrote, 0),
        )


@functools.cache
def _preadv() -> Any:
    """libc's `preadv(fd, iovec *, count, offset)`; ctypes releases the GIL around it."""
    call = ctypes.CDLL(None, use_errno=True).preadv
    call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
    call.restype = ctypes.c_ssize_t
    return call


@functools.cache
def _zero_source() -> int | None:
    """A descriptor that reads as zeros, tried once; None where there is no such thing."""
    try:
        source = os.open("/dev/zero", os.O_RDONLY | os.O_CLOEXEC)
        probe = np.full(64, 0xFF, dtype=np.uint8)
        pieces = np.array([[probe.ctypes.data, 64]], dtype=np.int64)
        wrote = _preadv()(source, pieces.ctypes.data, 1, 0)
    except (OSError, AttributeError):
        return None
    return source if wrote == 64 and not probe.any() else None


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, torch.get_num_threads() - 1), thread_name_prefix="kvcustody-scrub")
