"""What conditions K/V values, M1-M3; red-team case A6 (identity omission) for the model's fields."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import pytest

from kvcustody.errors import IdentityError
from kvcustody.governance.identity import tlv
from kvcustody.governance.identity.model_identity import ModelIdentity

BASE: dict[str, Any] = {
    "weights_digest": "sha256:11",
    "weights_epoch": 1,
    "tokenizer_digest": "sha256:22",
    "chat_template": "v3",
    "quantization": "none",
    "kv_dtype": "bfloat16",
    "kv_layout": "NHD",
    "block_tokens": 16,
    "rope": {"base": 10_000.0, "scaling": {"type": "yarn", "factor": 8.0}},
    "attention": {"heads": 32, "kv_heads": 8, "head_dim": 128, "window": None},
    "tensor_parallel": 2,
    "pipeline_parallel": 1,
    "shard_layout": "contiguous-heads",
    "adapter_digest": "sha256:33",
    "adapter_epoch": 1,
}
CHANGES: list[tuple[str, Any]] = [
    ("weights_digest", "sha256:12"),
    ("weights_epoch", 2),
    ("tokenizer_digest", "sha256:23"),
    ("chat_template", "v4"),
    ("quantization", "fp8"),
    ("kv_dtype", "float16"),
    ("kv_layout", "HND"),
    ("block_tokens", 32),
    ("rope", {"base": 500_000.0, "scaling": {"type": "yarn", "factor": 8.0}}),
    ("rope", {"base": 10_000.0, "scaling": {"type": "yarn", "factor": 4.0}}),
    ("rope", {"base": 10_000.0}),
    ("attention", {"heads": 32, "kv_heads": 8, "head_dim": 128, "window": 4_096}),
    ("tensor_parallel", 4),
    ("pipeline_parallel", 2),
    ("shard_layout", "interleaved-heads"),
    ("adapter_digest", "sha256:34"),
    ("adapter_epoch", 2),
]


def _digest_without(identity: ModelIdentity, name: str) -> bytes:
    """The control: the same digest with one field dropped."""
    names = [spec.name for spec in dataclasses.fields(identity) if spec.init]
    kept = {tag: value for tag, value in identity.encoded_fields().items() if names[tag - 1] != name}
    return hashlib.blake2b(tlv.encode("control", 1, kept), digest_size=32).digest()


def test_every_field_has_a_change_in_this_test() -> None:
    names = {spec.name for spec in dataclasses.fields(ModelIdentity) if spec.init}
    assert names == set(BASE) == {name for name, _ in CHANGES}


@pytest.mark.parametrize(("name", "value"), CHANGES, ids=[f"{n}-{i}" for i, (n, _) in enumerate(CHANGES)])
def test_each_field_changes_the_digest(name: str, value: Any) -> None:
    """One flipped field, another identity; with that field dropped, the same one."""
    base, changed = ModelIdentity(**BASE), ModelIdentity(**{**BASE, name: value})
    assert base.digest != changed.digest
    assert base != changed
    assert _digest_without(base, name) == _digest_without(changed, name)


def test_no_adapter_differs_from_every_adapter() -> None:
    bare = ModelIdentity(**{**BASE, "adapter_digest": None, "adapter_epoch": None})
    assert bare.digest != ModelIdentity(**BASE).digest


def test_equal_fields_give_one_digest_whatever_the_order_of_mappings() -> None:
    turned = {**BASE, "rope": dict(reversed(list(BASE["rope"].items())))}
    assert ModelIdentity(**BASE) == ModelIdentity(**turned)
    assert len({ModelIdentity(**BASE), ModelIdentity(**turned)}) == 1


def test_the_digest_of_a_fixed_identity_is_part_of_the_format() -> None:
    expected = "ac021f54706c5a5266ddb33bb9f2090334886f088fdf63d854ae1099728b1e36"
    assert ModelIdentity(**BASE).digest.hex() == expected


@pytest.mark.parametrize(
    "change",
    [
        {"weights_digest": ""},
        {"weights_digest": b"11"},
        {"weights_epoch": -1},
        {"weights_epoch": True},
        {"block_tokens": 0},
        {"block_tokens": 16.0},
        {"tensor_parallel": "2"},
        {"adapter_digest": None},
        {"adapter_epoch": None},
        {"adapter_digest": ""},
        {"rope": {"base": float("nan")}},
        {"attention": {"window": [1, 2]}},
    ],
)
def test_malformed_identities_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(IdentityError, match="model identity"):
        ModelIdentity(**{**BASE, **change})
