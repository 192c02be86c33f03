"""The page of the format is enough: a reader written from it alone opens the page's own vectors, and what we seal."""

from __future__ import annotations

import hashlib
import re
import struct
import zlib
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.kdf.kbkdf import KBKDFCMAC, CounterLocation, Mode

from kvcustody.errors import SealError
from kvcustody.governance.keys.locked_buffer import KeyBuffer
from kvcustody.governance.tiers.seal.extended_nonce import ExtendedNonceKey
from kvcustody.governance.tiers.seal.object_layout import ObjectFacts
from kvcustody.governance.tiers.seal.sealer import open_into, read_facts
from standins.governance.sealed_objects import facts, sealed

PAGE = Path(__file__).parents[3] / "docs/reference/formats/sealed-object.md"
CONTENT = b"what a tier may never read"
NAME = bytes(range(0x60, 0x80))
OBJECT_KEY, CATALOGUE_KEY = bytes(range(32)), bytes(range(0x20, 0x40))


def cipher(secret: bytes, data: bytes, use: bytes) -> tuple[AESGCM, bytes]:
    nonce = hashlib.blake2b(data[48:72] + data[16:48], digest_size=24, person=use.ljust(16, b"\0")).digest()
    fixed = b"X\0" + nonce[:12]
    kdf = KBKDFCMAC(AES256, Mode.CounterMode, 32, 2, None, CounterLocation.BeforeFixed, None, None, fixed)
    return AESGCM(kdf.derive(secret)), nonce[12:]


def packed(values: dict[str, object]) -> bytes:
    """Facts as the table says."""
    packet = bytearray(328)
    for at, code, name in (
        (0, "32s", "domain"), (32, "32s", "classification"), (64, "32s", "model"), (96, "32s", "layout"),
        (128, "32s", "parent"), (160, "32s", "first"), (192, "32s", "last"),
        (224, "<H", "shard"), (226, "<H", "shards"), (228, "<I", "depth"),
        (232, "<I", "blocks"), (236, "<I", "tokens"), (240, "<Q", "born_us"),
        (248, "<Q", "ceiling_us"), (256, "<I", "epoch"), (260, "16s", "subject"), (276, "16s", "bucket"),
        (292, "<Q", "due_us"), (300, "16s", "tenant"),
    ):  # fmt: skip
        value = values[name]
        struct.pack_into(code, packet, at, value.encode() if isinstance(value, str) else value)
    return bytes(packet)


def read(data: bytes, plain: bytes, object_key: bytes, catalogue: bytes) -> tuple[bytes, bytes]:
    """Content and enclosed facts of an object."""
    assert data[:6] == b"KVSO\x01\x01"
    flags, size = struct.unpack_from("<HQ", data, 6)
    at = 72
    enclosed = b""
    if flags & 1:
        opener, nonce = cipher(catalogue, data, b"kvso/1 facts")
        enclosed, at = opener.decrypt(nonce, data[at : at + 344], data[:72]), at + 344
    if flags & 2:
        assert zlib.crc32(data[:-4]) == int.from_bytes(data[-4:], "little")
    assert len(data) == at + size + 16 + (4 if flags & 2 else 0)
    opener, nonce = cipher(object_key, data, b"kvso/1 content")
    return opener.decrypt(nonce, data[at : at + size + 16], data[:72] + plain), enclosed


def of_the_page() -> ObjectFacts:
    digests = [bytes([first]) * 32 for first in range(0xD0, 0xD6)]
    return ObjectFacts(
        digests[0], "internal", *digests[1:], 1, 2, 3, 4, 64,
        1_700_000_000_000_000, 1_700_000_060_000_000, 5, b"\xe0" * 16, b"\xe1" * 16,
        1_700_000_030_000_000, b"\xe2" * 16,
    )  # fmt: skip


def key(secret: bytes) -> ExtendedNonceKey:
    with KeyBuffer() as buffer:
        buffer.take(bytes(bytearray(secret)))
        return ExtendedNonceKey(buffer)


@pytest.mark.parametrize("number", [0, 1])
def test_the_vectors_of_the_page(number: int) -> None:
    """The reader from the page and ours open them alike; a bit of the vector changed, neither does."""
    found = re.findall(r"```\n([0-9a-f\n]+)```", PAGE.read_text())
    assert len(found) == 2
    data, plain = bytes.fromhex(found[number].replace("\n", "")), packed(of_the_page()._asdict())
    content, enclosed = read(data, plain, OBJECT_KEY, CATALOGUE_KEY)
    assert content == CONTENT and enclosed == (plain if number else b"")
    into = bytearray(len(CONTENT))
    open_into(key(OBJECT_KEY), NAME, of_the_page(), memoryview(data), memoryview(into))
    assert into == CONTENT
    if number:
        assert read_facts(key(CATALOGUE_KEY), NAME, memoryview(data)) == of_the_page()
    changed = bytearray(data)
    changed[-10] ^= 1
    with pytest.raises(SealError):
        open_into(key(OBJECT_KEY), NAME, of_the_page(), memoryview(changed), memoryview(into))


def test_the_page_s_reader_opens_what_we_seal() -> None:
    what = facts(classification="restricted", shard=3, shards=8)
    data = sealed(key(OBJECT_KEY), NAME, what, CONTENT, facts_key=key(CATALOGUE_KEY), checked=True)
    assert read(bytes(data), packed(what._asdict()), OBJECT_KEY, CATALOGUE_KEY) == (CONTENT, what.to_bytes())
