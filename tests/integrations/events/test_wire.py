"""Wire formats: round trips, what we add to every event, what is withheld, and hostile bytes."""

from __future__ import annotations

import hashlib
import resource
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcustody.allocator.pool.accounting import Domain
from kvcustody.errors import IsolationError
from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.integrations.events import incoming, sglang_wire, vllm_wire
from kvcustody.integrations.events.block_event import (
    BlockEvent,
    EventScope,
    check_event,
    cleared,
    removed,
    scope_of,
    stored,
)
from kvcustody.integrations.events.custody_field import CustodyField
from standins.integrations.kv_wires import (
    ACME,
    SALT_CANARY,
    TOKEN_CANARY,
    key,
    keys,
    some_removed,
    some_stored,
)

WIRES: dict[str, Any] = {"vllm": vllm_wire, "sglang": sglang_wire}
EVENTS = [some_stored(), some_removed(), cleared(5, "start")]
TOKEN_BYTES = msgspec.msgpack.encode(TOKEN_CANARY)

hashes = st.binary(min_size=1, max_size=64) | st.integers(-(2**63), 2**64 - 1)
small = st.integers(0, 2**31 - 1)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
custodies = st.builds(
    CustodyField,
    tenant=text,
    scope=text,
    classification=text,
    domain=small,
    revision=small,
    residency=small,
    incarnation=text,
    cause=text,
    keys=st.none() | st.lists(st.binary(max_size=32), max_size=2),
)
extras = st.none() | st.lists(st.none() | st.lists(text, max_size=2).map(tuple), max_size=3)
maybe_text, maybe_small = st.none() | text, st.none() | small
int64 = st.integers(-(2**63), 2**63 - 1)
tokens = st.lists(small, max_size=4)
ours = {"kvcustody": st.none() | custodies}
vllm_events = st.one_of(
    st.builds(
        vllm_wire.GovernedStored,
        block_hashes=st.lists(hashes, max_size=3),
        parent_block_hash=st.none() | hashes,
        token_ids=tokens,
        block_size=small,
        lora_id=maybe_small,
        medium=maybe_text,
        lora_name=maybe_text,
        extra_keys=extras,
        group_idx=maybe_small,
        kv_cache_spec_kind=maybe_text,
        locality=maybe_text,
        session_id=maybe_text,
        **ours,
    ),
    st.builds(
        vllm_wire.GovernedRemoved,
        block_hashes=st.lists(hashes, max_size=3),
        medium=maybe_text,
        group_idx=maybe_small,
        **ours,
    ),
    st.builds(vllm_wire.GovernedCleared, **ours),
)
sglang_events = st.one_of(
    st.builds(
        sglang_wire.SglangBlockStored,
        block_hashes=st.lists(int64, max_size=3),
        parent_block_hash=st.none() | int64,
        token_ids=tokens,
        block_size=small,
        lora_id=maybe_small,
        medium=maybe_text,
        cache_salt=maybe_text,
        session_id=maybe_text,
        lora_name=maybe_text,
        **ours,
    ),
    st.builds(sglang_wire.SglangBlockRemoved, block_hashes=st.lists(int64, max_size=3), medium=maybe_text, **ours),
    st.builds(sglang_wire.SglangAllBlocksCleared, **ours),
)


def encoded(form: str, events: list[BlockEvent], *, published: bool = False) -> bytes:
    return WIRES[form].payload_of(events, 1.5, 2, "inc", tokens_published=published)


def as_maps(payload: bytes) -> list[dict[str, Any]]:
    """A consumer without our types: what is really on the wire."""
    made: list[dict[str, Any]] = msgspec.msgpack.decode(payload)[1]
    return made


@settings(max_examples=60, deadline=None)
@given(events=st.lists(vllm_events, max_size=4), ts=st.floats(0, 1e10), rank=st.none() | small)
def test_vllm_batches_come_back_as_they_were(events: list[Any], ts: float, rank: int | None) -> None:
    batch = vllm_wire.GovernedBatch(ts, events, rank)
    assert vllm_wire.decode(vllm_wire.encode(batch)) == batch


@settings(max_examples=60, deadline=None)
@given(events=st.lists(sglang_events, max_size=4), ts=st.floats(0, 1e10), rank=st.none() | small)
def test_sglang_batches_come_back_as_they_were(events: list[Any], ts: float, rank: int | None) -> None:
    batch = sglang_wire.SglangEventBatch(ts, events, rank)
    assert sglang_wire.decode(sglang_wire.encode(batch)) == batch


def check_scopes(maps: list[dict[str, Any]]) -> None:
    """What every subscriber may rely on: EVENTS, each with the scope of its blocks."""
    whole = {"classification": "internal", "domain": 3, "revision": 5, "scope": "tenant", "tenant": "acme"}
    stored_map, removed_map, cleared_map = maps
    for event in (stored_map, removed_map):
        assert whole.items() <= event["kvcustody"].items()
        assert event["kvcustody"]["residency"] == 7 and event["kvcustody"]["incarnation"] == "inc"
    assert removed_map["type"] == "BlockRemoved" and removed_map["kvcustody"]["cause"] == "expired"
    assert cleared_map["kvcustody"]["tenant"] == "*" and cleared_map["kvcustody"]["scope"] == "worker"


@pytest.mark.parametrize("form", WIRES)
def test_every_event_has_its_scope_removal_included(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_scopes(as_maps(encoded(form, EVENTS)))
    whole = WIRES[form].custody_of
    for kind in ("stored", "removed", "cleared"):  # the control: each kind of event, with its scope dropped

        def dropped(event: BlockEvent, *rest: Any, lost: str = kind, **more: Any) -> CustodyField | None:
            made: CustodyField = whole(event, *rest, **more)
            return None if event.kind == lost else made

        monkeypatch.setattr(WIRES[form], "custody_of", dropped)
        with pytest.raises((AssertionError, KeyError)):
            check_scopes(as_maps(encoded(form, EVENTS)))


@pytest.mark.parametrize(
    "event",
    [
        some_removed()._replace(scope=None),  # type: ignore[arg-type]
        some_removed()._replace(scope=EventScope("", "tenant", "internal", 1, 1)),
        some_removed()._replace(scope=EventScope("acme", "", "internal", 1, 1)),
        some_stored()._replace(scope=("acme", "tenant", "internal", 1, 1)),  # type: ignore[arg-type]
        some_stored()._replace(keys=keys(0, 2)[:-1]),
        some_stored()._replace(keys=b""),
        some_stored()._replace(parent=b"short"),
        some_stored()._replace(tokens=[1] * 9),
        cleared(1, "x")._replace(scope=ACME),
        some_stored()._replace(kind="moved"),
    ],
)
def test_an_event_without_scope_or_with_cut_keys_is_refused(event: BlockEvent) -> None:
    with pytest.raises(IsolationError):
        check_event(event)
    for good in EVENTS:
        check_event(good)


def test_scope_of_a_domain_is_its_label_and_no_subject() -> None:
    label = DomainLabel("acme", "internal", 1, "subject", "alice", "chat-1", None)
    scope = scope_of(Domain(9, None, label=label), 4)  # type: ignore[arg-type]
    assert scope == EventScope("acme", "subject", "internal", 9, 4)
    with pytest.raises(IsolationError, match="no label"):
        scope_of(Domain(9, None), 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", WIRES)
@pytest.mark.parametrize("published", [False, True])
def test_token_ids_and_salts_leave_only_where_published(form: str, published: bool) -> None:
    payload = encoded(form, EVENTS, published=published)
    assert (TOKEN_BYTES in payload) is published
    assert (SALT_CANARY.encode() in payload) is published
    assert as_maps(payload)[0]["token_ids"] == ([TOKEN_CANARY] * 8 if published else [])


def test_keys_leave_at_full_width_in_both_formats() -> None:
    event = as_maps(encoded("vllm", [some_stored(5, 2, parent=key(4))]))[0]
    assert event["block_hashes"] == [key(5), key(6)] and event["parent_block_hash"] == key(4)
    event = as_maps(encoded("sglang", [some_removed(5, 2)]))[0]
    assert event["kvcustody"]["keys"] == [key(5), key(6)]
    assert event["block_hashes"] == [int.from_bytes(key(n)[:8], "big", signed=True) for n in (5, 6)]


def test_a_consumer_of_the_engines_own_events_reads_ours() -> None:
    """vLLM's own shape, strictly typed, as a consumer would declare it: our field is skipped."""

    class BlockStored(msgspec.Struct, tag=True):
        block_hashes: list[bytes | int]
        parent_block_hash: bytes | int | None
        token_ids: list[int]
        block_size: int
        lora_id: int | None
        medium: str | None

    (event,) = msgspec.convert(as_maps(encoded("vllm", [some_stored()])), list[BlockStored])
    assert event.block_hashes == [key(0), key(1)] and event.block_size == 4


def test_sglang_chain_is_seeded_by_the_salt() -> None:
    seed = hashlib.sha256(b"sglang-cache-salt-v1\0tenant-a").digest()
    pages = [b"\1\0\0\0\2\0\0\0", b"\7\0\0\0\10\0\0\0"]
    first = hashlib.sha256(seed + pages[0]).digest()
    second = hashlib.sha256(first + pages[1]).digest()
    expected = [int.from_bytes(digest[:8], "big", signed=True) for digest in (first, second)]
    assert sglang_wire.chain([1, 2, 7, 8, 9], 2, "tenant-a") == expected
    bare = hashlib.sha256(pages[0]).digest()
    assert sglang_wire.chain([1, 2], 2) == [int.from_bytes(bare[:8], "big", signed=True)]


# -- reading ----------------------------------------------------------------------------------------------------------


def test_both_forms_of_both_engines_are_read() -> None:
    pack = msgspec.msgpack.encode
    vllm_old = [
        "BlockStored",
        [b"a" * 32, 7],
        None,
        [1, 2],
        1,
        None,
        "GPU",
        "lora",
        [["lora", "salty"], None],
        2,
    ]
    sglang_old = ["BlockStored", [-5], -9, [[1, 2], [2, 3]], 2, None, "CPU_PINNED", {"cache_salt": "salty"}]
    oldest = ["BlockStored", [1], None, [1], 1, None]
    payload = pack([2.0, [vllm_old, sglang_old, oldest, ["BlockRemoved", [1]], ["AllBlocksCleared"]]])
    assert incoming.read(payload).events == (
        incoming.StoredBlocks([b"a" * 32, 7], None, "GPU", 2, ("salty",), None),
        incoming.StoredBlocks([-5], -9, "CPU_PINNED", 0, ("salty",), None),
        incoming.StoredBlocks([1], None, "GPU", 0, (), None),
        incoming.Removed([1], "GPU", 0),
        incoming.Cleared(),
    )
    ours = incoming.read(encoded("vllm", EVENTS, published=True))
    assert [type(event).__name__ for event in ours.events] == ["StoredBlocks", "Removed", "Cleared"]
    assert ours.events[0].salts == (SALT_CANARY,) and ours.events[0].custody.tenant == "acme"  # type: ignore[union-attr]
    theirs = incoming.read(encoded("sglang", EVENTS, published=True))
    assert theirs.events[0].salts == (SALT_CANARY,)  # type: ignore[union-attr]
    assert ours.utc_us == 1_500_000 and not ours.malformed


def test_an_observer_never_decodes_token_ids() -> None:
    read = incoming.read(encoded("vllm", EVENTS, published=True))
    assert str(TOKEN_CANARY) not in repr(read)
    assert str(TOKEN_CANARY) in repr(vllm_wire.decode(encoded("vllm", EVENTS, published=True)))


def test_one_bad_event_costs_itself_alone() -> None:
    good = {"type": "BlockRemoved", "block_hashes": [1], "medium": None}
    bad = [
        {"type": "BlockRemoved"},
        {"type": "BlockRemoved", "block_hashes": "x"},
        {"type": "BlockStored", "block_hashes": [b"x" * 65]},
        ["BlockStored", []],
    ]
    strange = [{"type": "BlockMoved"}, ["Other", 1], {}, [], 7, None, "x"]
    read = incoming.read(msgspec.msgpack.encode([1.0, [good, *bad, *strange, good]]))
    assert len(read.events) == 2 and read.malformed == len(bad) and read.unknown == len(strange)


@settings(max_examples=300, deadline=None)
@given(payload=st.binary(max_size=300))
def test_any_bytes_are_read_without_an_exception(payload: bytes) -> None:
    incoming.read(payload)


@settings(max_examples=150, deadline=None)
@given(events=st.lists(vllm_events | sglang_events, max_size=3), data=st.data())
def test_damaged_batches_are_read_without_an_exception(events: list[Any], data: st.DataObject) -> None:
    payload = bytearray(msgspec.msgpack.encode([1.0, events, 0]))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    incoming.read(bytes(payload[: data.draw(st.integers(0, len(payload)))]))


HOSTILE: dict[str, bytes] = {
    "array": b"\xdd\xff\xff\xff\xff",
    "batch": b"\x93\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff",
    "hashes": b"\x92\x01\x91\x82\xa4type\xacBlockRemoved\xacblock_hashes\xdd\xff\xff\xff\xff",
    "binary": b"\x92\x01\x91\x82\xa4type\xacBlockRemoved\xacblock_hashes\x91\xc6\xff\xff\xff\xff",
    "nested": b"\x91" * 1_000_000,
    "nan": msgspec.msgpack.encode([float("nan"), []]),
    "far future": msgspec.msgpack.encode([1e300, []]),
    "empty": b"",
}


@pytest.mark.parametrize("shape", HOSTILE)
def test_hostile_payloads_cost_nothing(shape: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    read = incoming.read(HOSTILE[shape])
    assert read.events == () and read.utc_us == 0
    assert read.malformed == (shape not in ("nan", "far future"))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


def test_constructors_keep_kinds_apart() -> None:
    assert removed(ACME, key(1), cause="evicted").kind == "removed"
    assert stored(ACME, key(1), residency=1, block_tokens=16).kind == "stored"
