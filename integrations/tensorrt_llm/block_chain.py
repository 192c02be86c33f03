"""Keys of a request's whole blocks: digests of all tokens up to each one's end, under a key of its domain.

chain = BlockChain(domain_salt, block_tokens)
chain.extend(tokens)
chain.keys                               # 32 bytes for each whole block
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kvcustody.governance.request import pack_tokens

KEY_BYTES = 32
_TOKEN_BYTES = 4


class BlockChain:
    """The tokens of one sequence, as far as they are known."""

    def __init__(self, domain_salt: str, block_tokens: int) -> None:
        self._state = hashlib.blake2b(digest_size=KEY_BYTES, key=bytes.fromhex(domain_salt), person=b"kvcustody trtllm")
        self._block_bytes = block_tokens * _TOKEN_BYTES
        self._rest = b""
        self.keys = bytearray()
        self.tokens = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens that follow. Raises `ConfigError` for what are no token ids."""
        data = self._rest + pack_tokens([int(token) for token in tokens])
        size = self._block_bytes
        whole = len(data) // size
        for at in range(0, whole * size, size):
            self._state.update(data[at : at + size])
            self.keys += self._state.copy().digest()
        self._rest = data[whole * size :]
        self.tokens += len(tokens)

    @property
    def blocks(self) -> int:
        """Whole blocks."""
        return len(self.keys) // KEY_BYTES

    def run(self, first: int, last: int) -> bytes:
        """The keys of blocks [first, last)."""
        return bytes(self.keys[KEY_BYTES * first : KEY_BYTES * last])

    def parent(self, first: int) -> bytes:
        """The key before block `first`; zeros at the chain's start."""
        return self.run(first - 1, first) if first else bytes(KEY_BYTES)
