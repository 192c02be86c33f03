"""Memory for one secret: locked, kept out of core dumps, emptied in forked children, and wiped on demand.

- A secret lives in its own anonymous mapping. Library calls get a `memoryview`; what they can only return as
  `bytes` is moved in and wiped where it stood.
- After `wipe()` the mapping holds zeros and `view()` raises; wiping twice is harmless.
- A child process sees zeros, so `view()` raises in any process but the one that filled the buffer: a zeroed
  key is never used.
- A buffer has no printable content and can be neither pickled nor copied.

Python and libraries copy what they are given: docs/concepts/keys.md lists which copies outlive a call, as measured.
"""

from __future__ import annotations

import ctypes
import hmac
import mmap
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, Self

from kvcustody.errors import KeyringError

KEY_BYTES = 32

_DONTDUMP = getattr(mmap, "MADV_DONTDUMP", 16)
_WIPEONFORK = 18  # linux/mman.h; the mmap module does not name it
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def derive(
    secret: KeyBuffer,
    *,
    salt: bytes | memoryview,
    info: bytes,
    into: KeyBuffer,
    scratch: KeyBuffer | None = None,
) -> None:
    """Derive 32 bytes with HKDF-SHA256 (RFC 5869) into a buffer, leaving no intermediate copy.

    `scratch` saves making a buffer for the step between; it is wiped. Two HMAC calls, because the library's
    own HKDF leaves a copy of its output on the heap (measured).
    """
    assert into.size == KEY_BYTES
    with KeyBuffer(KEY_BYTES) if scratch is None else scratch as extracted:
        extracted.take(hmac.digest(salt, secret.view(), "sha256"))
        into.take(hmac.digest(extracted.view(), info + b"\x01", "sha256"))


def wipe_bytes(result: bytes) -> None:
    """Overwrite a secret that a library could only return as `bytes`. The caller must own it alone."""
    assert len(result) > 1  # shorter ones are shared by the interpreter
    if sys.implementation.name == "cpython":
        ctypes.memset(id(result) + bytes.__basicsize__ - 1, 0, len(result))


def map_private(size: int) -> tuple[mmap.mmap, int, bool]:
    """Map whole pages for secrets; returns the mapping, its address, and whether it is locked (RLIMIT_MEMLOCK may
    refuse).

    It is in no core dump, and zeros in forked children, as far as the kernel knows how.
    """
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    mapped = mmap.mmap(-1, pages, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    locked = _LIBC.mlock(address, pages) == 0
    for advice in (_DONTDUMP, _WIPEONFORK):
        with suppress(OSError):  # an older kernel: docs/concepts/keys.md says what is lost
            mapped.madvise(advice)
    return mapped, address, locked


class KeyBuffer:
    """Owns `size` secret bytes until `wipe()`; also a context manager that wipes on exit."""

    __slots__ = ("__weakref__", "_address", "_filled", "_map", "_pid", "_view", "locked", "size")

    def __init__(self, size: int = KEY_BYTES) -> None:
        assert 0 < size <= mmap.PAGESIZE
        self.size = size
        self._map, self._address, self.locked = map_private(size)
        self._view = memoryview(self._map)[:size]
        self._pid = os.getpid()
        self._filled = False

    @classmethod
    def random(cls, size: int = KEY_BYTES) -> KeyBuffer:
        """Return a buffer filled by the kernel's generator, without a copy on the Python heap."""
        buffer = cls(size)
        with Path("/dev/urandom").open("rb", buffering=0) as source:
            if source.readinto(buffer._view) != size:
                raise KeyringError(f"the system's random generator returned fewer than `{size}` bytes", size=size)
        buffer._filled = True
        return buffer

    def writable(self) -> memoryview:
        """Return the memory for one library call to fill; the buffer counts as filled from then on."""
        self._same_process()
        self._filled = True
        return self._view

    def view(self) -> memoryview:
        """Return the secret, read-only, for a library call that does not keep it."""
        self._same_process()
        if not self._filled:
            raise KeyringError("the key buffer is wiped or was never filled")
        return self._view.toreadonly()

    def take(self, result: bytes) -> None:
        """Move a library's fresh result into the buffer, and wipe the original object.

        Some calls can only return `bytes`. The caller must own `result` alone; nothing else may ever read it.
        """
        assert len(result) == self.size
        self.writable()[:] = result
        wipe_bytes(result)

    def wipe(self) -> None:
        """Overwrite the secret; the system gets the mapping back with the buffer."""
        ctypes.memset(self._address, 0, self.size)
        self._filled = False

    def matches(self, other: KeyBuffer) -> bool:
        """Compare two secrets in constant time."""
        return hmac.compare_digest(self.view(), other.view())

    @property
    def filled(self) -> bool:
        """Whether the buffer holds a secret of this process."""
        return self._filled and self._pid == os.getpid()

    def _same_process(self) -> None:
        if self._pid != os.getpid():
            raise KeyringError("a key buffer was used in a forked process; open the keyring again there")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.wipe()

    def __del__(self) -> None:
        if getattr(self, "_view", None) is not None:
            self.wipe()

    def __repr__(self) -> str:
        return f"<KeyBuffer {'filled' if self._filled else 'empty'}>"

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise KeyringError("a key buffer cannot be pickled or copied")

    def __copy__(self) -> NoReturn:
        self.__reduce_ex__(2)

    def __deepcopy__(self, _: Any) -> NoReturn:
        self.__reduce_ex__(2)
