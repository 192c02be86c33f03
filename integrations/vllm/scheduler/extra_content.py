"""What conditions a vLLM request's K/V besides its token ids, as framed extra content, or the reason why it cannot.

1. Media and prompt embeddings enter the keyed state before the tokens of the block in which they begin, with their
   exact place. So a request that lacks one of them cannot reach a block that holds it.
2. Content that cannot be keyed is named. A request with such content reuses and publishes nothing, so it never gets a
   wrong hit.
3. A medium's identifier may be chosen by its sender. It is keyed under the sender's own domain, so a lie about it can
   only reach what that domain holds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from kvcustody.governance.identity.extra_content import Media, PromptEmbeddings, frame

if TYPE_CHECKING:
    import torch
    from vllm.v1.request import Request

_NONE: Mapping[int, bytes] = {}


class Extras(NamedTuple):
    """Framed extra content by block, or the reason why there is no key (`unkeyed`)."""

    frames: Mapping[int, bytes]
    unkeyed: str | None = None

    def begin_after(self, blocks: int) -> bool:
        """Return whether some content begins behind the first `blocks` blocks, where the running state would miss
        it.
        """
        return bool(self.frames) and max(self.frames) >= blocks


NO_EXTRAS = Extras(_NONE)


def extras_of(request: Request, block_tokens: int) -> Extras:
    """Return the extra content of `request`. Nearly every request has none, which costs three attribute reads."""
    if getattr(request, "resumable", False):
        return Extras(_NONE, "streaming input: the prompt is rewritten while it runs")
    if not request.mm_features and request.prompt_embeds is None:
        return NO_EXTRAS
    frames: dict[int, bytes] = {}
    if request.prompt_embeds is not None:
        frames[0] = frame(_embeddings(request.prompt_embeds, getattr(request, "prompt_is_token_ids", None)))
    for feature in request.mm_features:
        position = feature.mm_position
        if not feature.identifier:
            return Extras(_NONE, "a medium without an identifier")
        block, at = divmod(position.offset, block_tokens)
        media = Media(_digest(feature.identifier), (at, position.length), str(feature.modality))
        frames[block] = frames.get(block, b"") + frame(media)
    return Extras(frames)


def _digest(identifier: str) -> bytes:
    return hashlib.blake2b(identifier.encode("utf-8", "surrogatepass"), digest_size=32).digest()


def _embeddings(tensor: torch.Tensor, mask: list[bool] | None) -> PromptEmbeddings:
    """Return all the prompt's embeddings as one digest: requests that share only some of them share nothing."""
    import torch

    data = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
    digest = hashlib.blake2b(data.tobytes(), digest_size=32)
    if mask is not None:
        digest.update(bytes(map(bool, mask)))
    return PromptEmbeddings(digest.digest(), tuple(tensor.shape), str(tensor.dtype))
