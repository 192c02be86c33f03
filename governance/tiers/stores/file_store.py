"""Objects as files in one folder of a local disk, fanned out by name.

1. The folder is ours: made by us or empty, of mode 0700, no link, and locked; anything else is refused at start.
2. An object is written beside its place and renamed there. It is not synced: one that a crash cut short does not open,
   and is a miss. A delete is synced, so that what was ended does not come back.
3. Its room is asked for before it is written, where the file system can (`fallocate`): that takes less time than
   growing it, and a full disk is known before. Direct I/O is not used: of files that are not synced it was slower.
4. Objects found at a start are listed (`page`), and drafts are removed. Their use is up to the index.
5. If something other than a folder stands in a folder's place, or something other than a file in a file's place, it is
   a miss. `page` lists it, so a scan finds it as an unknown copy and ends it. No link is followed, and no pipe is
   waited for.
6. A full disk has no room; every other failure of the medium is a `StoreError`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import re
import stat
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from kvcustody.errors import ConfigError, StoreError
from kvcustody.governance.tiers.stores.store_protocol import NAME_BYTES, Deleted, Listed, OwnPlace

_MARK = "kvcustody-tier"
_HOLDER_BYTES = 4096
_SPARES = 4  # buffers that are kept for the next object
_DRAFT = ".draft"
_FAN = re.compile("[0-9a-f]{2}")
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe in an object's place holds nobody
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
_STRANGE = (errno.ENOTDIR, errno.ELOOP)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FileStore(OwnPlace):
    """`capacity_bytes` of files in `folder`. Raises a `ConfigError` that names the folder and the remedy."""

    kind, ends_by, outlives, is_shared, in_flight = "nvme", "unlinked", True, False, 1
    prepares_in_memory = True  # memory is handed out and given back on any thread, and no disk is asked

    def __init__(self, folder: Path, capacity_bytes: int) -> None:
        self.folder = folder
        self.capacity_bytes = capacity_bytes
        self._root = self._open()
        self._fans: dict[str, int] = {}
        self._sizes: dict[bytes, int] = {}
        self._prepared: dict[bytes, mmap.mmap] = {}
        self._prepared_sizes: dict[bytes, int] = {}
        self._preparing = 0  # their sum
        self._lock = threading.Lock()  # of what is prepared, what is being read, and the spares
        self._loading: dict[bytes, list[mmap.mmap]] = {}
        self._spares: list[mmap.mmap] = []
        self._allocates = True
        try:
            self._find()
        except OSError as error:
            raise ConfigError(f"nvme tier `{folder}`: cannot be read ({error.strerror}); give another folder") from None

    @property
    def used_bytes(self) -> int:
        """The bytes of stored files, and of those being written."""
        return self._used + self._preparing

    def taken(self, size: int) -> int:
        """The object's own bytes."""
        return size

    def prepare_store(self, name: bytes, size: int, until_us: int = 0) -> memoryview | None:
        """Lend memory to seal into, which is written as a whole."""
        self.abandon_store(name)
        if self.used_bytes + size > self.capacity_bytes:
            return None
        made = self._buffer(size)
        with self._lock:
            self._prepared[name] = made
            self._prepared_sizes[name] = size
            self._preparing += size
        return memoryview(made)[:size]

    def start_store(self, name: bytes) -> None:
        """Do nothing: `GuardedStore` has a thread for concurrent stores."""

    def complete_store(self, name: bytes) -> bool:
        """Write and rename. Raises `StoreError` where the medium refuses; nothing is stored then."""
        data, size = self._take(name)
        if data is None:
            raise StoreError(f"nvme tier `{self.folder}`: object `{name.hex()[:16]}` was not prepared")
        file = name.hex()
        draft = file + _DRAFT
        try:
            fan = self._fan(file)
            descriptor = os.open(
                draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=fan
            )
            try:
                self._allocate(descriptor, size)
                _write_all(descriptor, memoryview(data)[:size])
            finally:
                os.close(descriptor)
            os.rename(draft, file, src_dir_fd=fan, dst_dir_fd=fan)
            self._used += size - self._sizes.get(name, 0)
            self._sizes[name] = size
        except OSError as error:
            self._discard(draft)
            what = "is full" if error.errno in _FULL else f"cannot be written ({error.strerror})"
            raise StoreError(f"nvme tier `{self.folder}`: {what}") from None
        finally:
            self._spare(data, size)
        return True

    def abandon_store(self, name: bytes) -> None:
        """Give the memory back: nothing was written yet."""
        data, size = self._take(name)
        if data is not None:
            self._spare(data, size)

    def _take(self, name: bytes) -> tuple[mmap.mmap | None, int]:
        """What was prepared, which is not prepared any more; its bytes count until its memory is a spare."""
        with self._lock:
            return self._prepared.pop(name, None), self._prepared_sizes.pop(name, 0)

    def start_load(self, name: bytes) -> None:
        """Do nothing."""

    def abandon_load(self, name: bytes) -> None:
        """Do nothing: no load was started."""

    def prepare_load(self, name: bytes) -> memoryview | None:
        """Return the file's bytes, in memory until `complete_load`, even if the file is deleted."""
        if name not in self._sizes:
            return None
        descriptor = self._opened(name.hex())
        if descriptor is None:
            return None
        size = min(os.fstat(descriptor).st_size, self._sizes[name] + 1)  # longer than what was kept: no more is read
        data = self._buffer(size)
        try:
            read = _read_all(descriptor, memoryview(data)[:size])
        except OSError as error:
            self._spare(data)
            raise StoreError(f"nvme tier `{self.folder}`: cannot be read ({error.strerror})") from None
        finally:
            os.close(descriptor)
        with self._lock:
            self._loading.setdefault(name, []).append(data)
        return memoryview(data)[:read].toreadonly()

    def complete_load(self, name: bytes) -> None:
        """Release the memory for the next load."""
        with self._lock:
            loading = self._loading[name]
            data = loading.pop()
            if not loading:
                del self._loading[name]
        self._spare(data)

    def peek(self, name: bytes, size: int) -> bytes | None:
        """Return the file's first bytes."""
        descriptor = self._opened(name.hex())
        if descriptor is None:
            return None
        try:
            return os.pread(descriptor, size, 0)
        except OSError as error:
            raise StoreError(f"nvme tier `{self.folder}`: cannot be read ({error.strerror})") from None
        finally:
            os.close(descriptor)

    def _opened(self, file: str) -> int | None:
        """An object's file; None where there is none, or something else (rule 5)."""
        try:
            descriptor = os.open(file, _READ, dir_fd=self._fan(file))
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENXIO, *_STRANGE):
                return None
            raise StoreError(f"nvme tier `{self.folder}`: cannot be read ({error.strerror})") from None
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        return None

    def delete(self, names: Iterable[bytes]) -> Deleted:
        """Unlink, and sync the folders, so that a reported end is permanent."""
        objects = size = 0
        absent, failed, touched = [], [], set()
        for name in names:
            known = self._sizes.pop(name, None)
            file = name.hex()
            try:
                fan = self._fan(file)
                length = os.stat(file, dir_fd=fan, follow_symlinks=False).st_size if known is None else known
                os.unlink(file, dir_fd=fan)
            except FileNotFoundError:
                self._used -= known or 0
                absent.append(name)
                continue
            except OSError:
                if self._end_strange(name):
                    objects += 1
                    continue
                if known is not None:
                    self._sizes[name] = known
                failed.append(name)
                continue
            self._used -= known or 0
            objects += 1
            size += length
            touched.add(fan)
        try:
            for fan in touched:
                os.fsync(fan)
        except OSError as error:
            raise StoreError(f"nvme tier `{self.folder}`: a delete cannot be synced ({error.strerror})") from None
        return Deleted(objects, size, tuple(absent), tuple(failed))

    def page(self, after: bytes, limit: int) -> list[Listed]:
        """List the folder itself by name, not the books about it."""
        entries: list[Listed] = []
        for number in range(after[0] if after else 0, 256):
            fan = f"{number:02x}"
            try:
                status = os.stat(fan, dir_fd=self._root, follow_symlinks=False)
            except FileNotFoundError:
                continue
            try:
                if self._is_strange(fan):
                    name = _name_of_strange(number)
                    entries += [Listed(name, status.st_size)] if name > after else []
                else:
                    entries += self._page_of(fan, after, limit - len(entries))
            except OSError as error:
                raise StoreError(f"nvme tier `{self.folder}`: cannot be read ({error.strerror})") from None
            if len(entries) == limit:
                break
        return entries

    def _page_of(self, fan: str, after: bytes, limit: int) -> list[Listed]:
        entries: list[Listed] = []
        for file in sorted(_listed(self._fan(fan))):
            name = _name_of(file)
            if name is None or name <= after or len(entries) == limit:
                continue
            try:
                size = os.stat(file, dir_fd=self._fan(fan), follow_symlinks=False).st_size
            except FileNotFoundError:  # since it was listed
                continue
            entries.append(Listed(name, size))
        return entries

    def holder(self) -> bytes:
        """Return the folder holder's last note (`tiers.heirs`); empty in a new one."""
        try:
            return os.pread(self._mark, _HOLDER_BYTES, 0)
        except OSError:
            return b""

    def write_holder(self, written: bytes, mark: bytes | None = None) -> None:
        """Write the folder holder's note durably. Raises `StoreError`."""
        try:
            os.ftruncate(self._mark, 0)
            os.pwrite(self._mark, written, 0)
            os.fsync(self._mark)
        except OSError as error:
            raise StoreError(f"nvme tier `{self.folder}`: cannot be written ({error.strerror})") from None

    def close(self) -> None:
        """Close the folder; its files stay."""
        for fan in self._fans.values():
            os.close(fan)
        self._fans.clear()
        os.close(self._mark)
        os.close(self._root)

    # -- the folder -----------------------------------------------------------------------------------------------

    def _open(self) -> int:
        folder = self.folder
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                f"nvme tier `{folder}`: {error.strerror or error}; give a folder of its own, no link"
            ) from None
        try:
            problem = self._claim(root)
        except OSError as error:
            problem = f"{error.strerror or error}; give a folder of its own on a disk with room"
        if problem:
            os.close(root)
            raise ConfigError(f"nvme tier `{folder}`: {problem}")
        return root

    def _claim(self, root: int) -> str:
        """Lock the folder for this process; why it cannot be had, or nothing."""
        status = os.fstat(root)
        present = set(_listed(root))
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            return f"has mode `{stat.S_IMODE(status.st_mode):04o}` or another owner; chmod 700 it"
        if present and _MARK not in present:
            return "holds other files; give an empty folder"
        mark = os.open(_MARK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=root)
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(mark)
            return "is used by another process; give each process its own"
        self._mark = mark
        return ""

    def _find(self) -> None:
        self._used = 0
        for fan in _listed(self._root):
            if _FAN.fullmatch(fan) is None or self._is_strange(fan):
                continue
            for file in _listed(self._fan(fan)):
                name = _name_of(file)
                if name is not None:
                    size = os.stat(file, dir_fd=self._fan(fan), follow_symlinks=False).st_size
                    self._sizes[name] = size
                    self._used += size
                elif file.endswith(_DRAFT):
                    with suppress(IsADirectoryError):  # not ours: none of our drafts is one
                        os.unlink(file, dir_fd=self._fan(fan))

    def _end_strange(self, name: bytes) -> bool:
        """Remove what `page` lists under this name because it is in the place of a folder; whether it was that."""
        fan = name.hex()[:2]
        if name != _name_of_strange(name[0]) or not self._is_strange(fan):
            return False
        try:
            os.unlink(fan, dir_fd=self._root)
            os.fsync(self._root)
        except OSError:
            return False
        return True

    def _is_strange(self, fan: str) -> bool:
        """Whether something else is in the place of a folder of ours (rule 5)."""
        try:
            self._fan(fan)
        except OSError as error:
            if error.errno not in _STRANGE:
                raise
            return True
        return False

    def _fan(self, file: str) -> int:
        """The folder of this file, opened once."""
        fan = file[:2]
        descriptor = self._fans.get(fan)
        if descriptor is None:
            try:
                os.mkdir(fan, 0o700, dir_fd=self._root)
                os.fsync(self._root)
            except FileExistsError:
                pass
            descriptor = self._fans[fan] = os.open(fan, _READ | os.O_DIRECTORY, dir_fd=self._root)
        return descriptor

    def _allocate(self, descriptor: int, size: int) -> None:
        """Room for the whole file. Raises `OSError` where there is none."""
        if not (self._allocates and size) or _LIBC.fallocate(descriptor, 0, 0, size) == 0:
            return
        failed = ctypes.get_errno()
        if failed in _FULL:
            raise OSError(failed, os.strerror(failed))
        self._allocates = False  # of this file system: a write says what is wrong, if anything is

    def _buffer(self, size: int) -> mmap.mmap:
        """Memory for one object: what another had, where it is large enough."""
        with self._lock:
            for at, spare in enumerate(self._spares):
                if len(spare) >= size:
                    return self._spares.pop(at)
        return mmap.mmap(-1, max(size, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def _spare(self, buffer: mmap.mmap, prepared: int = 0) -> None:
        with self._lock:
            self._preparing -= prepared
            if len(self._spares) < _SPARES:
                self._spares.append(buffer)

    def _discard(self, draft: str) -> None:
        try:
            os.unlink(draft, dir_fd=self._fan(draft))
        except OSError:
            return  # nothing was made, or the next start removes it


def _write_all(descriptor: int, data: memoryview) -> None:
    written = 0
    while written < len(data):
        written += os.write(descriptor, data[written:])


def _read_all(descriptor: int, into: memoryview) -> int:
    done = 0
    while done < len(into):
        count = os.readv(descriptor, [into[done:]])
        if not count:
            break
        done += count
    return done


def _listed(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def _name_of_strange(number: int) -> bytes:
    """The name under which something in the place of this folder is listed."""
    return bytes([number]).ljust(NAME_BYTES, b"\0")


def _name_of(file: str) -> bytes | None:
    if len(file) != 2 * NAME_BYTES:
        return None
    try:
        return bytes.fromhex(file)
    except ValueError:
        return None
