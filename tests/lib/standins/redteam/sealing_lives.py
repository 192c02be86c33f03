"""Processes that seal under the same keys, one after the other and beside each other, and what their nonces were.

A fingerprint is the first bytes that AES-256-GCM's key stream has for a key and nonce: two that are alike are one pair
that was used twice, however it came about.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import threading
import traceback
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvcustody.governance.tiers.seal import sealer
from kvcustody.governance.tiers.seal.extended_nonce import TAG_BYTES, ExtendedNonceKey
from kvcustody.governance.tiers.seal.object_layout import ObjectFacts, object_bytes
from kvcustody.governance.tiers.seal.sealer import seal_into
from standins.governance.sealed_objects import World, facts

THREADS = 8
PRINT_BYTES = 16
NAMES = [bytes([at]) * 32 for at in range(4)]  # few: the same name again and again is what could repeat a nonce
HOUR_US = 3_600_000_000


class Counting:
    """A control: random bytes that are none. A counter, kept in a file when a life ends in order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next = int(path.read_text()) if path.exists() else 0

    def urandom(self, size: int) -> bytes:
        """The next number."""
        self._next += 1
        return self._next.to_bytes(size, "big")

    def keep(self) -> None:
        """As it stands."""
        self._path.write_text(str(self._next))


class _Prints:
    """A cipher that tells its fingerprint when it seals."""

    def __init__(self, cipher: object, found: list[bytes]) -> None:
        self._cipher, self._found = cipher, found

    def encrypt_into(self, nonce: bytes, content: bytes, bound: bytes, into: memoryview) -> int:
        self._found.append(self._cipher.encrypt(nonce, bytes(PRINT_BYTES), None)[:-TAG_BYTES])  # type: ignore[attr-defined]
        return int(self._cipher.encrypt_into(nonce, content, bound, into))  # type: ignore[attr-defined]


class _Printing:
    """A sealing key whose ciphers tell their fingerprints."""

    def __init__(self, key: ExtendedNonceKey, found: list[bytes]) -> None:
        self._key, self._found = key, found

    def of_message(self, nonce: bytes) -> tuple[_Prints, bytes]:
        cipher, last = self._key.of_message(nonce)
        return _Prints(cipher, self._found), last


def key_of(world: World) -> tuple[ExtendedNonceKey, ObjectFacts]:
    """The key of one domain and time bucket, the same in every process, and facts of its objects."""
    spec, bucket = world.spec("acme"), world.shred.of_bucket("internal", HOUR_US, HOUR_US).id
    return world.keys.of(spec, bytes(16), bucket), facts(subject=bytes(16), bucket=bucket)


def seal_often(key: ExtendedNonceKey, what: ObjectFacts, count: int) -> list[bytes]:
    """Seal `count` objects on `THREADS` threads; their fingerprints."""
    sealed: list[list[bytes]] = [[] for _ in range(THREADS)]

    def run(number: int) -> None:
        printing = _Printing(key, sealed[number])
        into = memoryview(bytearray(object_bytes(16, enclosed=False, checked=False)))
        for at in range(number, count, THREADS):
            seal_into(printing, NAMES[at % len(NAMES)], what, bytes(16), into)  # type: ignore[arg-type]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [one for each in sealed for one in each]


def live(folder: Path, number: int, count: int, counts: bool, prints: Path) -> None:
    """One process: opens the keys, seals a part, forks, and seals on in both; never returns."""
    try:
        drawn = random.Random(number)
        counting = Counting(folder / "counter") if counts else None
        if counting is not None:
            sealer.os = counting  # type: ignore[attr-defined]
        world = World(folder)
        world.clock.step_utc(drawn.randrange(-HOUR_US, HOUR_US))
        key, what = key_of(world)
        part = count // 4
        sealed = seal_often(key, what, count - 3 * part)
        child = os.fork()
        sealed = seal_often(key, what, part) + (sealed if child else [])
        if not child:  # it has its parent's key still; and as one that begins, it opens what is there
            sealed += seal_often(*key_of(World(folder)), part)
        path = prints / f"{number}-{'parent' if child else 'child'}"
        path.write_bytes(b"".join(sealed))
        if child and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            os._exit(1)
        if counting is not None and child and drawn.random() < 0.5:  # the others are killed
            counting.keep()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def lives(folder: Path, restarts: int, seals: int, *, counts: bool = False) -> tuple[int, int]:
    """So many processes over one folder, which is put back now and then; how many fingerprints, and how many twice."""
    held, before, prints = folder / "keys", folder / "before", folder / "prints"
    held.mkdir()
    prints.mkdir()
    first = World(held)
    first.spec("acme")
    first.shred.of_bucket("internal", HOUR_US, HOUR_US)
    first.close()
    for number in range(restarts):
        if number % 3 == 0:
            shutil.rmtree(before, ignore_errors=True)
            shutil.copytree(held, before)
        elif number % 3 == 2:
            shutil.rmtree(held)
            shutil.copytree(before, held)
        child = os.fork()
        if not child:
            live(held, number, seals // restarts, counts, prints)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return repeated([np.fromfile(path, "<u8").reshape(-1, 2) for path in sorted(prints.iterdir())])


def repeated(parts: list[NDArray[np.uint64]]) -> tuple[int, int]:
    """How many there are, and how many are one that was there."""
    every = np.concatenate(parts)
    every = every[np.lexsort((every[:, 1], every[:, 0]))]
    return len(every), int((every[1:] == every[:-1]).all(axis=1).sum())
