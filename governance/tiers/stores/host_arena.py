"""Objects in host memory: one arena, mapped once, in extents that are zeroed when they end.

1. An object lies in one piece; the smallest free extent that holds it is taken, and free neighbours are joined.
2. A freed extent is zeroed, and read back, before it can be handed out again. Objects are sealed, so this is the second
   defence; it is what makes their end evidence that needs no key.
3. The arena is a private mapping: no file, no other process, not in core dumps.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable

from kvcustody.errors import ConfigError, StoreError
from kvcustody.governance.tiers.stores.store_protocol import Deleted, Listed, OwnPlace

_ALIGNMENT = 4096
_NORESERVE = 0x4000  # linux/mman.h; the mmap module names it from 3.13 on
_LIBC = ctypes.CDLL(None)
_LIBC.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_DONTDUMP = getattr(mmap, "MADV_DONTDUMP", 16)


class _Placed:
    """One object's extent. `loads` readers use it now."""

    __slots__ = ("is_doomed", "loads", "size", "start")

    def __init__(self, start: int, size: int) -> None:
        self.start = start
        self.size = size
        self.loads = 0
        self.is_doomed = False


class HostArena(OwnPlace):
    """`capacity_bytes` of host memory. Raises `ConfigError` where the system refuses them."""

    kind, ends_by, outlives, is_shared, in_flight = "host", "zeroed", False, False, 1

    def __init__(self, capacity_bytes: int, place: Callable[[int, int], None] | None = None) -> None:
        """`place(address, size)` may say where the memory lies, before it is touched."""
        self.capacity_bytes = capacity_bytes // _ALIGNMENT * _ALIGNMENT
        if self.capacity_bytes < _ALIGNMENT:
            raise ConfigError(f"host tier: `{capacity_bytes}` bytes are less than one page; give more, or no tier")
        try:
            self._map = mmap.mmap(-1, self.capacity_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"host tier: no `{capacity_bytes}` bytes of memory ({error}); give less") from None
        self._map.madvise(_DONTDUMP)
        self._view = memoryview(self._map)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        if place is not None:
            place(self._address, self.capacity_bytes)
        self._placed: dict[bytes, _Placed] = {}
        self._prepared: dict[bytes, _Placed] = {}
        self._loading: dict[bytes, list[_Placed]] = {}
        self._by_start: list[int] = [0]  # free extents
        self._length = {0: self.capacity_bytes}
        self._by_length: list[tuple[int, int]] = [(self.capacity_bytes, 0)]
        self._used = 0

    @property
    def used_bytes(self) -> int:
        """The bytes of used extents, in whole pages."""
        return self._used

    def taken(self, size: int) -> int:
        """The object's bytes rounded up to whole pages."""
        return _pages(size)

    def prepare_store(self, name: bytes, size: int, until_us: int = 0) -> memoryview | None:
        """Lend memory in the arena itself, so that a sealed object is not copied again."""
        self.abandon_store(name)
        start = self._take(size)
        if start is None:
            return None
        self._prepared[name] = _Placed(start, size)
        return self._view[start : start + size]

    def start_store(self, name: bytes) -> None:
        """Do nothing: the object is in place."""

    def complete_store(self, name: bytes) -> bool:
        """Publish the object, and end an older one of its name."""
        prepared = self._prepared.pop(name, None)
        if prepared is None:
            raise StoreError(f"host tier: object `{name.hex()[:16]}` was not prepared")
        older = self._placed.pop(name, None)
        if older is not None:
            self._end(older)
        self._placed[name] = prepared
        return True

    def abandon_store(self, name: bytes) -> None:
        """Zero and free the extent."""
        prepared = self._prepared.pop(name, None)
        if prepared is not None:
            self._end(prepared)

    def start_load(self, name: bytes) -> None:
        """Do nothing."""

    def abandon_load(self, name: bytes) -> None:
        """Do nothing: no load was started."""

    def prepare_load(self, name: bytes) -> memoryview | None:
        """Return the object in place."""
        placed = self._placed.get(name)
        if placed is None:
            return None
        placed.loads += 1
        self._loading.setdefault(name, []).append(placed)
        return self._view[placed.start : placed.start + placed.size].toreadonly()

    def complete_load(self, name: bytes) -> None:
        """Release the object; its last reader frees an ended one."""
        loading = self._loading[name]
        placed = loading.pop()
        if not loading:
            del self._loading[name]
        placed.loads -= 1
        if placed.is_doomed and not placed.loads:
            self._free(placed)

    def peek(self, name: bytes, size: int) -> bytes | None:
        """Return a copy of its beginning."""
        placed = self._placed.get(name)
        return None if placed is None else bytes(self._view[placed.start : placed.start + min(size, placed.size)])

    def delete(self, names: Iterable[bytes]) -> Deleted:
        """Zero these extents; those being read are zeroed afterwards."""
        objects = size = 0
        absent = []
        for name in names:
            placed = self._placed.pop(name, None)
            if placed is None:
                absent.append(name)
                continue
            objects += 1
            size += placed.size
            self._end(placed)
        return Deleted(objects, size, tuple(absent))

    def page(self, after: bytes, limit: int) -> list[Listed]:
        """List objects by name after `after`."""
        names = sorted(name for name in self._placed if name > after)[:limit]
        return [Listed(name, self._placed[name].size) for name in names]

    def close(self) -> None:
        """Zero every extent, and release the memory."""
        ctypes.memset(self._address, 0, self.capacity_bytes if self._used else 0)
        self._placed.clear()
        self._prepared.clear()
        self._used = 0

    # -- extents --------------------------------------------------------------------------------------------------

    def _end(self, placed: _Placed) -> None:
        if placed.loads:
            placed.is_doomed = True
        else:
            self._free(placed)

    def _take(self, size: int) -> int | None:
        need = _pages(size)
        at = bisect_left(self._by_length, (need, -1))
        if at == len(self._by_length):
            return None
        length, start = self._by_length.pop(at)
        self._drop(start)
        if length > need:
            self._add(start + need, length - need)
        self._used += need
        return start

    def _free(self, placed: _Placed) -> None:
        length = _pages(placed.size)
        self._zero(placed.start, length)
        self._used -= length
        start = placed.start
        at = bisect_left(self._by_start, start)
        if at < len(self._by_start) and self._by_start[at] == start + length:
            length += self._remove(self._by_start[at])
        if at and self._by_start[at - 1] + self._length[self._by_start[at - 1]] == start:
            start = self._by_start[at - 1]
            length += self._remove(start)
        self._add(start, length)

    def _zero(self, start: int, length: int) -> None:
        ctypes.memset(self._address + start, 0, length)
        first = self._address + start
        if self._map[start] or _LIBC.memcmp(first, first + 1, length - 1):  # each byte is as the one before
            raise StoreError("host tier: an extent is not zero after it was zeroed")

    def _add(self, start: int, length: int) -> None:
        insort(self._by_start, start)
        self._length[start] = length
        insort(self._by_length, (length, start))

    def _remove(self, start: int) -> int:
        length = self._length[start]
        self._by_length.pop(bisect_left(self._by_length, (length, start)))
        self._drop(start)
        return length

    def _drop(self, start: int) -> None:
        self._by_start.pop(bisect_left(self._by_start, start))
        del self._length[start]


def _pages(size: int) -> int:
    return max(1, -(-size // _ALIGNMENT)) * _ALIGNMENT  # an object of nothing has a place too
