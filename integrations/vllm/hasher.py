"""Our keys in place of vLLM's block hashes: the hash that vLLM would make, and the keys that replace it.

H1 vLLM builds a `Request` on its input thread, before anybody has verified whose it is. The hasher that is
   installed in the engine yields nothing, so no unscoped hash of a prompt ever exists in a governed engine.
H2 Once the engine's thread has admitted the request, its own hasher yields the keys of blocks that generated tokens
   complete, from the running keyed state: nothing is hashed twice.
H3 A request that may not publish has no hasher: its blocks can never enter the index.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvcustody.integrations.vllm.governed_request import GovernedRequest

_NOTHING: list[bytes] = []


def no_block_hashes(_request: Request) -> list[bytes]:
    """What a request's hasher says before admission (H1)."""
    return _NOTHING


def governed_block_hasher(*_args: Any, **_kwargs: Any) -> Callable[[Request], list[bytes]]:
    """Stands where the engine calls `get_request_block_hasher`, whatever its parameters are in this release."""
    return no_block_hashes


def running_hasher(
    governed: GovernedRequest, extend: Callable[[Any, list[int]], list[bytes]], block_tokens: int
) -> Callable[[Request], list[bytes]]:
    """The hasher of an admitted request: called for every accepted token, so it first asks whether a block is full."""
    tokens = governed.request._all_token_ids
    due_tokens = governed.keyed_tokens + block_tokens

    def keys(_request: Request) -> list[bytes]:
        nonlocal due_tokens
        if len(tokens) < due_tokens:
            return _NOTHING
        start = governed.told_tokens
        governed.told_tokens = governed.keyed_tokens = whole = len(tokens) // block_tokens * block_tokens
        due_tokens = whole + block_tokens
        return extend(governed.residency, tokens[start:whole])

    return keys
