"""An attacker with access to a tier's store, who takes sealed objects out of it and puts others in their places.

The objects are real: another prompt's, another tenant's, and an earlier one of the same name. Each is used in two
forms: as it was stored, and with its header rewritten to the requested name and length.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from kvcustody.governance.tiers import tier as tier_module
from kvcustody.governance.tiers.seal import sealer
from kvcustody.governance.tiers.seal.extended_nonce import TAG_BYTES, ExtendedNonceKey
from kvcustody.governance.tiers.seal.object_layout import HEADER_BYTES, ObjectFacts
from kvcustody.governance.tiers.stores.remote_store import ENVELOPE_BYTES
from kvcustody.governance.tiers.stores.store_protocol import TierStore
from standins.governance.store_servers import StoreServer
from standins.governance.tier_place import BLOCK, STEP, Place, keys_of

_NAME = slice(16, 48)


class Objects(NamedTuple):
    """The object that is asked for, and what else the attacker has."""

    name: bytes
    mine: bytes
    older: bytes
    swapped: bytes
    foreign: bytes


Attack = Callable[[Objects, Random], bytes]


def renamed(data: bytes, to: bytes) -> bytes:
    """The object with another name in its header, and the length that it has."""
    whole = bytearray(data)
    whole[_NAME] = to
    fixed = len(data) - len(_without_content(data))
    struct.pack_into("<Q", whole, 8, max(0, fixed))
    return bytes(whole)


def _without_content(data: bytes) -> bytes:
    """As many bytes as an object of these flags has beside its content."""
    encloses = data[6] & 1
    return bytes(HEADER_BYTES + encloses * (sealer.FACTS_BYTES + TAG_BYTES) + TAG_BYTES)


def _cut(data: bytes, drawn: Random) -> bytes:
    return data[: drawn.randrange(1, len(data))]


def _longer(data: bytes, drawn: Random) -> bytes:
    return data + drawn.randbytes(drawn.choice((1, 16, 4096)))


# What of these passes every check of the header: of them the tag alone tells.
WELL_FORMED: dict[str, Attack] = {
    "older": lambda has, drawn: has.older,
    "swapped, renamed": lambda has, drawn: renamed(has.swapped, has.name),
    "foreign, renamed": lambda has, drawn: renamed(has.foreign, has.name),
    "two halves": lambda has, drawn: has.mine[: len(has.mine) // 2] + has.older[len(has.mine) // 2 :],
    "a byte": lambda has, drawn: _changed(has.mine, drawn),
}
ATTACKS: dict[str, Attack] = WELL_FORMED | {
    "swapped": lambda has, drawn: has.swapped,
    "foreign": lambda has, drawn: has.foreign,
    "foreign header": lambda has, drawn: has.foreign[:HEADER_BYTES] + has.mine[HEADER_BYTES:],
    "truncated": lambda has, drawn: _cut(has.mine, drawn),
    "truncated, its header says so": lambda has, drawn: renamed(has.mine[:-BLOCK], has.name),
    "extended": lambda has, drawn: _longer(has.mine, drawn),
    "extended, its header says so": lambda has, drawn: renamed(_longer(has.mine, drawn), has.name),
    "empty": lambda has, drawn: b"",
    "zeros": lambda has, drawn: bytes(len(has.mine)),
    "random": lambda has, drawn: drawn.randbytes(len(has.mine)),
}


def _changed(data: bytes, drawn: Random) -> bytes:
    whole, at = bytearray(data), drawn.randrange(len(data) - BLOCK * STEP, len(data))
    whole[at] ^= drawn.randrange(1, 256)
    return bytes(whole)


def put(store: TierStore, name: bytes, data: bytes) -> None:
    """Another object under this name, through the store itself: its books know the new length."""
    into = store.prepare_store(name, len(data))
    assert into is not None
    into[:] = data
    into.release()
    store.complete_store(name)


def file_of(folder: Path, name: bytes) -> Path:
    """Where an object lies."""
    return folder / name.hex()[:2] / name.hex()


FileAttack = Callable[[Path, Path, Objects], None]


def _as_link(path: Path, other: Path, has: Objects) -> None:
    path.unlink()
    path.symlink_to(other)


def _as_hard_link(path: Path, other: Path, has: Objects) -> None:
    path.unlink()
    path.hardlink_to(other)


def _sparse(path: Path, other: Path, has: Objects) -> None:
    with path.open("r+b") as file:
        file.truncate(0)
        file.truncate(len(has.mine))


def _as_pipe(path: Path, other: Path, has: Objects) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def _exchanged(path: Path, other: Path, has: Objects) -> None:
    beside = path.with_name("beside")
    path.rename(beside)
    other.rename(path)
    beside.rename(other)


FILE_ATTACKS: dict[str, FileAttack] = {
    "exchanged": _exchanged,
    "symbolic link": _as_link,
    "hard link": _as_hard_link,
    "sparse": _sparse,
    "zero length": lambda path, other, has: os.truncate(path, 0),
    "cut": lambda path, other, has: os.truncate(path, len(has.mine) - 1),
    "longer": lambda path, other, has: os.truncate(path, len(has.mine) + 4096),
    "older": lambda path, other, has: (path.write_bytes(has.older), None)[1],
    "unlinked": lambda path, other, has: path.unlink(),
    "a pipe": _as_pipe,
}


class HostileStore:
    """A tier whose store is the attacker's. `attached` counts loads that put a byte on the device."""

    def __init__(self, folder: Path, kind: str, server: StoreServer | None = None) -> None:
        self.place = Place(folder, kind, server=server)
        self.server = server
        self.acme, self.beta = self.place.label("acme"), self.place.label("beta")
        self.attached = self.tried = 0

    def close(self) -> None:
        self.place.tier.close()
        self.place.staging.close()
        self.place.world.close()

    def stock(self) -> Objects:
        """One object of each kind, whole and in its place; all that was there before has ended."""
        place = self.place
        place.tier.expire()
        place.tier.destroy(list(place.tier.objects()))
        place.keep(self.acme, "p", STEP)
        (older,) = self._held().values()
        place.tier.destroy(list(place.tier.objects()))
        place.world.clock.advance(1_000)
        place.keep(self.acme, "p", STEP)
        ((name, mine),) = self._held().items()
        place.keep(self.acme, "q", STEP)
        place.keep(self.beta, "p", STEP)
        named = {label.tenant: self._name(label) for label in (self.acme, self.beta)}
        assert named["acme"] == name
        foreign = self._held()[named["beta"]]
        (swapped,) = (data for at, data in self._held().items() if at not in named.values())
        return Objects(name, mine, older, swapped, foreign)

    def _name(self, label: object) -> bytes:
        found = self.place.tier.lookup(label, keys_of("p", STEP), 0)  # type: ignore[arg-type]
        return found[0].name

    def _held(self) -> dict[bytes, bytes]:
        store, held = self.place.store, {}
        for one in store.page(b"", 99):
            data = store.peek(one.name, one.size)
            assert data is not None
            held[one.name] = data
        return held

    def put(self, name: bytes, data: bytes) -> None:
        """Another object under this name, by whoever has the store."""
        if self.server is None:
            put(self.place.store, name, data)
            return
        prefix = self.place.prefix
        envelope = self.server.raw(prefix, name)[:ENVELOPE_BYTES]
        self.server.raw(prefix, name, envelope + data)

    def load(self) -> int:
        """Ask for the object as a request does; how many blocks were put on the device."""
        self.tried += 1
        keys, written = keys_of("p", STEP), list[int]()
        found = self.place.tier.lookup(self.acme, keys, 0)
        assert found, "void: nothing was asked of the store"
        self.place.tier.load(self.acme, keys, 0, found, lambda at, count, skip, data: written.append(count))
        self.attached += bool(written)
        return sum(written)

    def attack(self, count: int, attacks: dict[str, Attack], seed: int) -> dict[str, int]:
        """`count` loads, each of an object that is not the one; by attack, how many attached something."""
        drawn, names = Random(seed), list(attacks)
        attached = dict.fromkeys(names, 0)
        has = self.stock()
        for number in range(count):
            if number % 500 == 499:
                has = self.stock()
            elif number:
                self.place.world.clock.advance(10)
                self.place.keep(self.acme, "p", STEP)
                data = self.place.store.peek(has.name, len(has.mine))
                assert data is not None
                has = has._replace(mine=data, older=has.mine)
            name = names[number % len(names)]
            self.put(has.name, attacks[name](has, drawn))
            attached[name] += bool(self.load())
            self.place.tier.destroy([has.name])  # where a control attached it, it is there still
        return attached


def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: whatever the store returns is taken, as by one who opens nothing."""

    def takes(key: object, name: bytes, facts: ObjectFacts, sealed: memoryview, into: memoryview) -> None:
        content = sealed[HEADER_BYTES : HEADER_BYTES + len(into)]
        into[: len(content)] = content

    monkeypatch.setattr(tier_module, "open_into", takes)


class _WithoutTag:
    """AES-256-GCM that decrypts and never looks at the tag."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def decrypt_into(self, nonce: bytes, data: memoryview, bound: bytes, into: memoryview) -> int:
        counter = modes.CTR(nonce + (2).to_bytes(4, "big"))
        plain = Cipher(algorithms.AES256(self._key), counter).decryptor().update(bytes(data[:-TAG_BYTES]))
        into[:] = plain
        return len(plain)


def without_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: everything is checked but the tag. Sealing stays what it is."""
    real = sealer.open_into

    def opens(key: ExtendedNonceKey, name: bytes, facts: ObjectFacts, sealed: memoryview, into: memoryview) -> None:
        class Key:
            def of_message(self, nonce: bytes) -> tuple[_WithoutTag, bytes]:
                return _WithoutTag(hashlib.sha256(nonce).digest()), nonce[12:]

        real(Key(), name, facts, sealed, into)  # type: ignore[arg-type]

    monkeypatch.setattr(tier_module, "open_into", opens)
