"""Our keys in place of vLLM's block hashes: the hasher that replaces vLLM's, and the keys.

1. vLLM builds a `Request` on its input thread, before anybody has verified whose it is. The hasher that is installed in
   the engine yields nothing, so no unscoped hash of a prompt ever exists in a governed engine.
2. The keys of blocks that generated tokens complete are made when vLLM would enter such a block into its index. They
   are made from the running keyed state. So nothing is hashed twice, and a token that completes no block costs nothing.
3. Where another connector runs beside ours it may read `block_hashes` by itself: there the request has a hasher, and
   its keys are as early as vLLM's hashes would be.
4. A request that may not publish gets no further key: its blocks can never enter the index.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvcustody.allocator.external.residency import ExternalResidency
    from kvcustody.integrations.vllm.scheduler.governed_request import GovernedRequest

_NOTHING: list[bytes] = []


def no_block_hashes(_request: Request) -> list[bytes]:
    """Return no hashes for a request before admission (rule 1)."""
    return _NOTHING


def governed_block_hasher(*_args: Any, **_kwargs: Any) -> Callable[[Request], list[bytes]]:
    """Replace the engine's `get_request_block_hasher`, whatever its parameters are in this release."""
    return no_block_hashes


def new_keys(
    governed: GovernedRequest, extend: Callable[[ExternalResidency, list[int]], list[bytes]], end: int
) -> list[bytes]:
    """Return the missing keys of the whole blocks that end at token `end` or earlier."""
    if end <= governed.keyed_tokens:
        return _NOTHING
    start, residency = governed.reported_tokens, governed.residency
    assert residency is not None, "keys are made for requests that run"
    governed.reported_tokens = governed.keyed_tokens = end
    return extend(residency, governed.request._all_token_ids[start:end])


def running_hasher(
    governed: GovernedRequest,
    extend: Callable[[ExternalResidency, list[int]], list[bytes]],
    block_tokens: int,
) -> Callable[[Request], list[bytes]]:
    """Return the hasher of an admitted request, which vLLM calls for every accepted token (rule 3)."""
    tokens = governed.request._all_token_ids

    def keys(_request: Request) -> list[bytes]:
        return new_keys(governed, extend, len(tokens) // block_tokens * block_tokens)

    return keys
