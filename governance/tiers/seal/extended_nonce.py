"""XAES-256-GCM (c2sp.org/XAES-256-GCM): one key may seal any number of messages under random 192-bit nonces.

1. Every message has an AES-256-GCM key of its own, derived from the key and half of the nonce (NIST SP 800-108r1
   with AES-CMAC); the other half is that key's nonce. There is no counter that a fork, a restart or a restored file
   could rewind.
2. What of the derivation depends on the key alone is computed once.
3. After `close` the key is in no buffer of this object, and it seals and opens nothing.
"""

from __future__ import annotations

from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvcustody.errors import SealError
from kvcustody.governance.keys.locked_buffer import KEY_BYTES, KeyBuffer

NONCE_BYTES = 24
TAG_BYTES = 16
_BLOCK = 16
_HALF = 12  # bytes of the nonce that the derivation takes; the rest is the derived key's
_TWICE = (1 << 128) + 1  # times a block: the block, twice
_DERIVED, _ZEROS = 3 * _BLOCK - 1, bytes(KEY_BYTES)  # what the library wants of room for two blocks
_POLYNOMIAL = 0x87  # of GF(2^128), as in NIST SP 800-38B


class ExtendedNonceKey:
    """One 256-bit key, taken from `key`, which the caller may wipe afterwards."""

    __slots__ = ("_blocks", "_inputs")

    def __init__(self, key: KeyBuffer) -> None:
        assert key.size == KEY_BYTES
        self._blocks: CipherContext | None = Cipher(algorithms.AES256(key.view()), modes.ECB()).encryptor()  # noqa: S305 - the block cipher itself, as the specification uses it
        whole = int.from_bytes(self._blocks.update(bytes(_BLOCK)), "big")
        doubled = (whole << 1) & ((1 << 128) - 1)
        subkey = doubled ^ _POLYNOMIAL if whole >> 127 else doubled
        both = b"\x00\x01X\x00" + bytes(_HALF) + b"\x00\x02X\x00" + bytes(_HALF)
        self._inputs = int.from_bytes(both, "big") ^ subkey * _TWICE  # of the two blocks, but for the nonce

    def of_message(self, nonce: bytes) -> tuple[AESGCM, bytes]:
        """Return the AES-256-GCM key of the message with this 24-byte nonce, and its 12-byte nonce."""
        if self._blocks is None:
            raise SealError("the sealing key was destroyed")
        assert len(nonce) == NONCE_BYTES
        inputs = self._inputs ^ int.from_bytes(nonce[:_HALF], "big") * _TWICE
        derived = bytearray(_DERIVED)
        self._blocks.update_into(inputs.to_bytes(2 * _BLOCK, "big"), derived)
        try:
            return AESGCM(memoryview(derived)[:KEY_BYTES]), nonce[_HALF:]
        finally:
            derived[:KEY_BYTES] = _ZEROS

    def close(self) -> None:
        """Forget the key."""
        self._blocks = None
        self._inputs = 0
