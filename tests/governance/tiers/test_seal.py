"""The sealed object: published vectors, and everything that must not open."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import struct
import threading
from collections.abc import Iterator

import pytest

from kvcustody.errors import SealError
from kvcustody.governance.keys.locked_buffer import KeyBuffer
from kvcustody.governance.tiers.seal import sealer
from kvcustody.governance.tiers.seal.extended_nonce import TAG_BYTES, ExtendedNonceKey
from kvcustody.governance.tiers.seal.object_layout import (
    FACTS_BYTES,
    HEADER_BYTES,
    ObjectFacts,
    object_bytes,
    read_header,
)
from kvcustody.governance.tiers.seal.sealer import is_sound, open_enclosed, open_into, read_facts, seal_into
from standins.governance.sealed_objects import World, facts, sealed

NAME = hashlib.sha256(b"name").digest()


def key(secret: bytes | None = None) -> ExtendedNonceKey:
    with KeyBuffer() as buffer:
        buffer.take(bytes(bytearray(secret or os.urandom(32))))
        return ExtendedNonceKey(buffer)


def opens(with_key: ExtendedNonceKey, name: bytes, what: ObjectFacts, data: bytes | bytearray, size: int) -> bool:
    into = bytearray(b"\xff" * size)
    try:
        open_into(with_key, name, what, memoryview(data), memoryview(into))
    except SealError:
        assert into == bytes(size), "plaintext, or what was there before, is left"
        return False
    return True


# -- the construction --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("secret", "bound", "expected"),
    [
        (b"\x01", b"", "ce546ef63c9cc60765923609b33a9a1974e96e52daf2fcf7075e2271"),
        (b"\x03", b"c2sp.org/XAES-256-GCM", "986ec1832593df5443a179437fd083bf3fdb41abd740a21f71eb769d"),
    ],
)
def test_the_published_vectors(secret: bytes, bound: bytes, expected: str) -> None:
    cipher, nonce = key(secret * 32).of_message(b"ABCDEFGHIJKLMNOPQRSTUVWX")
    assert cipher.encrypt(nonce, b"XAES-256-GCM", bound).hex() == expected


def test_the_published_accumulated_vectors() -> None:
    """10,000 random messages, hashed (c2sp.org/XAES-256-GCM, accumulated randomized tests)."""
    stream, accumulated = Shake(), hashlib.shake_128()
    for _ in range(10_000):
        secret, nonce = stream.take(32), stream.take(24)
        plain = stream.take(stream.take(1)[0])
        bound = stream.take(stream.take(1)[0])
        cipher, last = key(secret).of_message(nonce)
        accumulated.update(cipher.encrypt(last, plain, bound))
    assert accumulated.hexdigest(32) == "e6b9edf2df6cec60c8cbd864e2211b597fb69a529160cd040d56c0c210081939"


class Shake:
    """The bytes of SHAKE-128 of nothing, one after the other."""

    def __init__(self) -> None:
        self._bytes: Iterator[int] = iter(hashlib.shake_128().digest(6_000_000))

    def take(self, count: int) -> bytes:
        return bytes(next(self._bytes) for _ in range(count))


def test_a_closed_key_makes_no_other() -> None:
    one = key()
    one.of_message(bytes(24))
    one.close()
    with pytest.raises(SealError, match="destroyed"):
        one.of_message(bytes(24))


# -- what is bound -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("enclosed", [False, True])
@pytest.mark.parametrize("size", [0, 1, 4096, 70_001])
def test_what_was_sealed_comes_back(size: int, enclosed: bool, checked: bool) -> None:
    object_key, two, what, content = key(), key(), facts(), os.urandom(size)
    data = sealed(object_key, NAME, what, content, facts_key=two if enclosed else None, checked=checked)
    assert len(data) == object_bytes(size, enclosed=enclosed, checked=checked)
    into = bytearray(size)
    open_into(object_key, NAME, what, memoryview(data), memoryview(into))
    assert into == content and is_sound(memoryview(data)) == (True if checked else None)
    if enclosed:
        assert read_facts(two, NAME, memoryview(data)) == what
        with pytest.raises(SealError, match="do not open"):
            read_facts(object_key, NAME, memoryview(data))
    else:
        with pytest.raises(SealError, match="encloses no facts"):
            read_facts(two, NAME, memoryview(data))
    assert content[:16] not in bytes(data) or size < 16


def test_what_no_index_knows_opens_by_the_facts_that_it_encloses_and_by_nothing_else() -> None:
    object_key, two, what, content = key(), key(), facts(), os.urandom(512)
    data, other = (sealed(object_key, NAME, what, each, facts_key=two) for each in (content, os.urandom(512)))
    seen: list[ObjectFacts] = []

    def opened(name: bytes, given: bytes, with_key: ExtendedNonceKey | None = None) -> bool:
        def key_of(found: ObjectFacts) -> ExtendedNonceKey:
            seen.append(found)
            if with_key is None:
                raise SealError("its time is over")
            return with_key

        into = bytearray(b"x" * 512)
        try:
            open_enclosed(two, name, memoryview(given), memoryview(into), key_of)
        except SealError:
            assert into == bytes(512), "nothing is left of what did not open"
            return False
        assert into == content
        return True

    assert opened(NAME, data, object_key) and seen == [what], "control"
    assert opened(NAME, bytes(data) + b"behind it", object_key), "a buffer that goes on is no other object"
    assert not opened(NAME, data), "whoever is told the facts may refuse"
    assert not opened(NAME, data, two) and not opened(os.urandom(32), data, object_key)
    spliced = bytes(data[: -512 - TAG_BYTES]) + bytes(other[-512 - TAG_BYTES :])
    assert not opened(NAME, spliced, object_key), "another object's content behind these facts"
    assert not opened(NAME, sealed(object_key, NAME, what, content), object_key), "it encloses none"
    for at in range(0, len(data), 7):
        flipped = bytearray(data)
        flipped[at] ^= 1
        assert not opened(NAME, bytes(flipped), object_key), at


def test_every_fact_and_the_name_are_bound() -> None:
    object_key, what, content = key(), facts(), os.urandom(512)
    data = sealed(object_key, NAME, what, content)
    assert opens(object_key, NAME, what, data, 512), "control"
    assert not opens(key(), NAME, what, data, 512)
    assert not opens(object_key, os.urandom(32), what, data, 512)
    for field in ObjectFacts._fields:
        value = getattr(what, field)
        other = value + 1 if isinstance(value, int) else "public" if isinstance(value, str) else value[::-1]
        assert not opens(object_key, NAME, what._replace(**{field: other}), data, 512), field


def test_a_renamed_object_does_not_open_even_with_its_header_rewritten() -> None:
    """Its header says the other name: the bound bytes and the object's key both tell."""
    one, what, content = key(), facts(), os.urandom(512)
    data, other = sealed(one, NAME, what, content), os.urandom(32)
    data[16:48] = other
    assert read_header(memoryview(data)).name == other, "void: the name is not where the test rewrites it"
    assert not opens(one, other, what, data, 512)


def test_older_swapped_cut_and_longer_ones_do_not_open() -> None:
    object_key, what, content = key(), facts(), os.urandom(4096)
    data = sealed(object_key, NAME, what, content)
    older = sealed(object_key, NAME, what._replace(born_us=1), content)
    assert not opens(object_key, NAME, what, older, 4096)
    half = len(data) // 2
    assert not opens(object_key, NAME, what, data[:half] + sealed(object_key, NAME, what, content)[half:], 4096)
    for size in (0, 1, HEADER_BYTES - 1, HEADER_BYTES, len(data) - 1):
        assert not opens(object_key, NAME, what, data[:size], 4096), size
    assert not opens(object_key, NAME, what, data + b"\0", 4096)
    assert not opens(object_key, NAME, what, os.urandom(len(data)), 4096)
    assert not opens(object_key, NAME, what, data, 4095)


def test_every_flipped_bit_is_found() -> None:
    """Of a small object each bit, in its header and tag too; and by the checksum alone, but in unused room: none."""
    object_key, two, what, content = key(), key(), facts(), os.urandom(64)
    data = sealed(object_key, NAME, what, content, facts_key=two, checked=True)
    assert opens(object_key, NAME, what, data, 64) and is_sound(memoryview(data)), "control"
    for bit in range(len(data) * 8):
        data[bit // 8] ^= 1 << bit % 8
        assert is_sound(memoryview(data)) is not True, bit
        in_facts = HEADER_BYTES <= bit // 8 < HEADER_BYTES + FACTS_BYTES + 16
        in_sum = bit // 8 >= len(data) - 4
        if in_facts:
            with pytest.raises(SealError):
                read_facts(two, NAME, memoryview(data))
        elif not in_sum:
            assert not opens(object_key, NAME, what, data, 64), bit
        data[bit // 8] ^= 1 << bit % 8
    assert opens(object_key, NAME, what, data, 64)


def test_random_flips_of_large_ones_are_found() -> None:
    drawn, object_key, what = random.Random(1), key(), facts()
    data = sealed(object_key, NAME, what, os.urandom(1 << 20))
    assert opens(object_key, NAME, what, data, 1 << 20), "control"
    for _ in range(200):
        bit = drawn.randrange(len(data) * 8)
        data[bit // 8] ^= 1 << bit % 8
        assert not opens(object_key, NAME, what, data, 1 << 20), bit
        data[bit // 8] ^= 1 << bit % 8


def test_a_header_s_numbers_move_nothing() -> None:
    """Lengths and flags of a lying store: refused before anything is allocated or opened."""
    data = sealed(key(), NAME, facts(), os.urandom(64))
    for at, code, value in ((8, "<Q", 1 << 62), (8, "<Q", 65), (6, "<H", 0xFFFC), (4, "<B", 2), (5, "<B", 9)):
        forged = bytearray(data)
        struct.pack_into(code, forged, at, value)
        with pytest.raises(SealError, match=r"out of bounds|its header says|not known here"):
            read_header(memoryview(forged))


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(SealError, match="do not fit"):
        seal_into(key(), NAME, facts(), bytes(64), memoryview(bytearray(100)))
    with pytest.raises(SealError, match="has room for 32 bytes"):
        sealed(key(), NAME, facts(classification="c" * 33), b"")


# -- no nonce twice ----------------------------------------------------------------------------------------------------


def nonces(count: int, threads: int = 1) -> list[bytes]:
    """The message nonces of so many objects under one key and one name: what must never repeat."""
    object_key, what, drawn = key(bytes(range(32))), facts(), list[bytes]()

    def run() -> None:
        for _ in range(count):
            header = read_header(memoryview(sealed(object_key, NAME, what, b"x")))
            drawn.append(sealer._nonce(header.nonce, NAME, sealer._CONTENT))

    workers = [threading.Thread(target=run) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return drawn


def test_no_nonce_repeats_over_processes_forks_and_threads() -> None:
    """The same key in every process; nothing is kept between them that could be rewound."""
    context = multiprocessing.get_context("fork")
    with context.Pool(4) as pool:
        parts = pool.starmap(nonces, [(500, 2)] * 20)
    every = [nonce for part in parts for nonce in part] + nonces(500)
    assert len(every) == 20_500 == len(set(every))


def test_the_same_random_bytes_under_two_names_are_two_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that was restored with its random state: a repeat needs the same name, so the same content."""
    monkeypatch.setattr(os, "urandom", bytes)
    one, what = key(bytes(range(32))), facts(subject=bytes(16), bucket=bytes(16))
    first, second = (sealed(one, name, what, bytes(64)) for name in (NAME, NAME[::-1]))
    assert first[HEADER_BYTES:] != second[HEADER_BYTES:]
    assert sealed(one, NAME, what, bytes(64)) == first, "control: nothing else is random"


# -- keys that end things ----------------------------------------------------------------------------------------------


def test_each_key_ends_what_needs_it_and_nothing_else(world: World) -> None:
    """A subject, a bucket, a tenant: after the destruction of one, its objects do not open, and every other does."""
    ada, bob, beta = world.spec("acme", "ada"), world.spec("acme", "bob"), world.spec("beta")
    subjects = {spec: world.shred.of_subject(hashlib.sha256(spec.info).digest()).id for spec in (ada, bob)}
    early, late = (world.shred.of_bucket("internal", at, 60_000_000).id for at in (59_000_000, 61_000_000))
    assert early != late and world.shred.of_bucket("internal", 1, 60_000_000).id == early
    held = {}
    for spec in (ada, bob, beta):
        for bucket in (early, late):
            subject = subjects.get(spec, bytes(16))
            what = facts(subject=subject, bucket=bucket)
            held[spec, bucket] = (what, sealed(world.keys.of(spec, subject, bucket), NAME, what, b"content"))

    def opening() -> set[tuple[str, str]]:
        readable = set()
        for (spec, bucket), (what, data) in held.items():
            try:
                one = world.keys.of(spec, what.subject, what.bucket)
            except Exception as error:
                assert "destroyed" in str(error)
                continue
            assert opens(one, NAME, what, data, 7)
            readable.add((spec.subject or "beta", "early" if bucket == early else "late"))
        return readable

    every = {(who, when) for who in ("ada", "bob", "beta") for when in ("early", "late")}
    assert opening() == every
    world.shred.destroy(subjects[ada])
    assert opening() == every - {("ada", "early"), ("ada", "late")}
    assert [receipt.key.id for receipt in world.shred.destroy_due(60_000_000)] == [early]
    assert opening() == {("bob", "late"), ("beta", "late")}
    world.close()
    world.open()
    assert opening() == {("bob", "late"), ("beta", "late")}, "nor after a restart"
    world.keyring.destroy(bob.owner, 1)
    assert opening() == {("beta", "late")}
    again = world.shred.of_subject(hashlib.sha256(ada.info).digest()).id
    assert again != subjects[ada], "who comes again has a new key"


def test_names_tell_nothing_without_the_domain(world: World) -> None:
    acme, beta, layout = world.spec("acme"), world.spec("beta"), bytes(32)
    named = {
        world.keys.name(spec, last, shard=shard, layout=layout)
        for spec in (acme, beta)
        for last in (b"a" * 32, b"b" * 32)
        for shard in (0, 1)
    }
    assert len(named) == 8 and all(len(name) == 32 for name in named)
    assert world.keys.name(acme, b"a" * 32, shard=0, layout=layout) in named, "control: the same again"
