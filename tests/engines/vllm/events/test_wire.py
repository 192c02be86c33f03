"""Our encoding of vLLM's KV events against vLLM's own structs and encoder: field by field and byte for byte (V1-V3)."""

from __future__ import annotations

import random
from typing import Any

import pytest

msgspec = pytest.importorskip("msgspec")
theirs = pytest.importorskip("vllm.distributed.kv_events")
vllm = pytest.importorskip("vllm")

from kvcustody.integrations.events import incoming, vllm_wire  # noqa: E402
from kvcustody.integrations.events.block_event import EventScope, cleared, removed, stored  # noqa: E402
from kvcustody.integrations.events.custody_field import CustodyField  # noqa: E402

KINDS = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
GOVERNED = {
    "BlockStored": "GovernedStored",
    "BlockRemoved": "GovernedRemoved",
    "AllBlocksCleared": "GovernedCleared",
}
SCOPE = EventScope("acme", "tenant", "internal", 3, 5)
KEYS = bytes(range(64))


exact = pytest.mark.skipif(
    not str(vllm.__version__).startswith("0.32."), reason="the bytes that we write are those of vLLM 0.32"
)


def some(kind: Any, draw: random.Random) -> Any:
    """A random event of one of vLLM's classes; about every other optional field is at its default."""
    values = {
        "block_hashes": [draw.randbytes(32), draw.getrandbits(64)][: draw.randint(0, 2)],
        "parent_block_hash": draw.choice([None, draw.randbytes(32), draw.getrandbits(64)]),
        "token_ids": [draw.getrandbits(draw.randint(1, 31)) for _ in range(draw.randint(0, 20))],
        "block_size": draw.choice([1, 16, 784]),
        "lora_id": draw.choice([None, 3]),
        "medium": draw.choice([None, "GPU", "CPU", "STORAGE"]),
        "lora_name": draw.choice([None, "adapter-ä"]),
        "extra_keys": draw.choice([None, [("salt",), None], [("lora", ("mm-id", 4), "salt", b"digest")]]),
        "group_idx": draw.choice([None, 0, 7]),
        "kv_cache_spec_kind": draw.choice([None, "full_attention"]),
        "kv_cache_spec_sliding_window": draw.choice([None, 4096]),
        "locality": draw.choice([None, "LOCAL"]),
        "ownership": draw.choice([None, "fs"]),
        "session_id": draw.choice([None, "chat"]),
    }
    return kind(**{name: values[name] for name in kind.__struct_fields__})


def converted(event: Any) -> Any:
    """The same event as our struct."""
    fields = {name: getattr(event, name) for name in event.__struct_fields__}
    return getattr(vllm_wire, f"Vllm{type(event).__name__}")(**fields)


def as_plain(event: Any) -> dict[str, Any]:
    plain = msgspec.to_builtins(event, builtin_types=(bytes,))
    return {name: value for name, value in plain.items() if value is not None}


@exact
@pytest.mark.parametrize("kind", KINDS)
def test_fields_order_defaults_and_tags_are_theirs(kind: str) -> None:
    their, our = getattr(theirs, kind), getattr(vllm_wire, f"Vllm{kind}")
    assert our.__struct_fields__ == their.__struct_fields__
    assert our.__struct_config__.tag == their.__struct_config__.tag == kind
    assert our.__struct_config__.omit_defaults == their.__struct_config__.omit_defaults
    defaults = [{f.name: f.default for f in msgspec.structs.fields(one) if not f.required} for one in (our, their)]
    assert defaults[0] == defaults[1]
    governed = getattr(vllm_wire, GOVERNED[kind])
    assert governed.__struct_fields__ == (*their.__struct_fields__, "kvcustody")
    assert governed.__struct_config__.tag == kind


@exact
def test_bytes_are_theirs_for_two_thousand_random_batches() -> None:
    draw = random.Random(1)
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(theirs.KVEventBatch)
    for _ in range(2000):
        events = [some(getattr(theirs, draw.choice(KINDS)), draw) for _ in range(draw.randint(0, 3))]
        ts, rank = draw.random() * 1e9, draw.choice([None, 0, 3])
        payload = encoder.encode(theirs.KVEventBatch(ts=ts, events=events, data_parallel_rank=rank))
        assert vllm_wire.encode(vllm_wire.VllmEventBatch(ts, [converted(e) for e in events], rank)) == payload
        assert list(map(as_plain, vllm_wire.decode(payload).events)) == list(
            map(as_plain, decoder.decode(payload).events)
        )
        read = incoming.read(payload)
        assert len(read.events) == len(events) and not read.malformed and not read.unknown


@exact
def test_a_difference_in_one_field_would_be_seen() -> None:
    """The control of the test above: the same event with our field has other bytes."""
    event = some(theirs.BlockRemoved, random.Random(2))
    fields = {name: getattr(event, name) for name in event.__struct_fields__}
    plain = msgspec.msgpack.encode(theirs.KVEventBatch(1.0, [event], 0))
    assert vllm_wire.encode(vllm_wire.VllmEventBatch(1.0, [converted(event)], 0)) == plain
    scope = CustodyField("acme", "tenant", "internal", 1, 1)
    governed = vllm_wire.GovernedRemoved(**fields, kvcustody=scope)
    assert vllm_wire.encode(vllm_wire.VllmEventBatch(1.0, [governed], 0)) != plain


def test_their_own_typed_decoder_reads_what_we_publish() -> None:
    events = [
        stored(SCOPE, KEYS, residency=7, block_tokens=2, tokens=[1, 2, 3, 4], salt="pepper"),
        removed(SCOPE, KEYS[:32], cause="expired", group=1),
        cleared(5, "start"),
    ]
    decoder = msgspec.msgpack.Decoder(theirs.KVEventBatch)
    batch = decoder.decode(vllm_wire.payload_of(events, 1.5, 2, "inc", tokens_published=True))
    kept, gone, reset = batch.events
    assert kept.block_hashes == [KEYS[:32], KEYS[32:]] and kept.token_ids == [1, 2, 3, 4]
    assert kept.extra_keys == [("pepper",), None] and kept.block_size == 2 and kept.medium == "GPU"
    assert gone.block_hashes == [KEYS[:32]] and gone.group_idx == 1
    assert isinstance(reset, theirs.AllBlocksCleared) and batch.data_parallel_rank == 2
    withheld = decoder.decode(vllm_wire.payload_of(events, 1.5, 2, "inc", tokens_published=False)).events[0]
    assert withheld.token_ids == [] and withheld.extra_keys is None


def test_their_salt_is_where_we_look_for_it() -> None:
    utils = pytest.importorskip("vllm.v1.core.kv_cache_utils")
    convert = getattr(utils, "to_event_extra_keys", None)
    if convert is None:
        pytest.skip("this vLLM publishes extra keys as they are")
    keys = convert([(("lora", "adapter"), ("mm", "image", 3), ("cache_salt", "pepper")), None])
    event = theirs.BlockStored([b"h"], None, [], 16, None, "GPU", "adapter", extra_keys=keys)
    (read,) = incoming.read(msgspec.msgpack.encode(theirs.KVEventBatch(1.0, [event], 0))).events
    assert isinstance(read, incoming.StoredBlocks) and read.salts == ("pepper",)
