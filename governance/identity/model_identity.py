"""Everything that conditions the K/V values of a block, as one 32-byte digest.

- Every field reaches the digest. Two identities that differ in any field share no block.
- An epoch rises each time weights or an adapter are loaded, so a reload under the same digest is a new
  identity.
- Sampling parameters are not part of it: they do not change K/V values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType

from kvcustody.errors import IdentityError
from kvcustody.governance.identity import tlv

SCHEMA = "kvcustody/model-identity"
VERSION = 1
DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True, eq=False)
class ModelIdentity:
    """What was loaded and how. Digests are text as the loader names them (`sha256:…`); configs are nested
    mappings.

    `rope` and `attention` hold what the model's config states: base, scaling, window sizes, heads, head
    dimensions, sinks.
    """

    weights_digest: str
    weights_epoch: int
    tokenizer_digest: str
    chat_template: str
    quantization: str
    kv_dtype: str
    kv_layout: str
    block_tokens: int
    rope: Mapping[str, tlv.Value]
    attention: Mapping[str, tlv.Value]
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    shard_layout: str = "contiguous-heads"
    adapter_digest: str | None = None
    adapter_epoch: int | None = None
    digest: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._check()
        object.__setattr__(self, "rope", MappingProxyType(dict(self.rope)))
        object.__setattr__(self, "attention", MappingProxyType(dict(self.attention)))
        try:
            record = tlv.encode(SCHEMA, VERSION, self.encoded_fields())
        except (TypeError, ValueError) as error:
            raise IdentityError(f"model identity: {error}") from error
        digest = hashlib.blake2b(record, digest_size=DIGEST_BYTES, person=b"kvc-model-id").digest()
        object.__setattr__(self, "digest", digest)

    def encoded_fields(self) -> dict[int, tlv.Value]:
        """Tag to value, in declaration order; tags are part of the format and are never reused."""
        names = [spec.name for spec in fields(self) if spec.init]
        return {tag: getattr(self, name) for tag, name in enumerate(names, start=1)}

    def named(self) -> dict[str, str | int | None]:
        """Return what a log says about the model, so that an operator can declare a segment for it."""
        return {
            "model_digest": self.digest.hex(),  # a name that logs may show
            "block_tokens": self.block_tokens,
            "weights": self.weights_digest,
            "weights_epoch": self.weights_epoch,
            "adapter": self.adapter_digest,
        }

    def _check(self) -> None:
        for name in (
            "weights_digest",
            "tokenizer_digest",
            "chat_template",
            "quantization",
            "kv_dtype",
            "kv_layout",
        ):
            if type(getattr(self, name)) is not str or not getattr(self, name):
                raise IdentityError(f"model identity: `{name}` must be non-empty text", field=name)
        for name in ("block_tokens", "tensor_parallel", "pipeline_parallel"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise IdentityError(f"model identity: `{name}` must be a positive integer", field=name)
        if type(self.weights_epoch) is not int or self.weights_epoch < 0:
            raise IdentityError("model identity: `weights_epoch` must be an integer from 0", field="weights_epoch")
        if (self.adapter_digest is None) != (self.adapter_epoch is None) or self.adapter_digest == "":
            raise IdentityError(
                "model identity: an adapter needs both a digest and a load epoch", field="adapter_digest"
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelIdentity) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)
