"""The forms that routers index: Dynamo's and Mooncake's. Every store is in its tenant's namespace, or is not reported.

Mooncake's indexer is not available as a package, and the packaged master is built without events. So the tests read the
examples of its documentation and the maps that its master's source writes. The index here follows its documentation.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcustody.allocator.pool.accounting import Domain
from kvcustody.errors import ConfigError
from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.governance.edge.current_namespaces import CurrentNamespaces
from kvcustody.governance.edge.named_requester import NamedRequester
from kvcustody.governance.identity.domain_spec import DomainSpec, ScopeKind
from kvcustody.integrations.events import incoming
from kvcustody.integrations.events.block_event import (
    BlockEvent,
    EventScope,
    cleared,
    scope_of,
)
from kvcustody.integrations.events.dynamo_wire import DynamoWire, screen
from kvcustody.integrations.events.mooncake_wire import MooncakeWire
from kvcustody.integrations.events.publisher import EventPublisher
from standins.integrations.kv_wires import ACME as UNOWNED
from standins.integrations.kv_wires import TOKEN_CANARY, key, some_removed, some_stored
from standins.integrations.router_names import NamedWire, lasting_names

ISSUER = "https://idp.example"
ACME = EventScope("acme", "tenant", "internal", 3, 5, NamedRequester(ISSUER, "acme"))
GLOBEX = EventScope("globex", "tenant", "internal", 4, 5, NamedRequester(ISSUER, "globex"))
pack = msgspec.msgpack.encode


def namespaces(fill: int = 1) -> CurrentNamespaces:
    return lasting_names(bytes([fill]) * 32)


NAMES = namespaces()
NS_ACME, NS_GLOBEX = NAMES.of(ISSUER, "acme"), NAMES.of(ISSUER, "globex")


def told(wire: Any, *events: BlockEvent, published: bool = True) -> list[dict[str, Any]]:
    payload = wire.payload_of(list(events), 1.5, 0, "inc", tokens_published=published)
    made: list[dict[str, Any]] = msgspec.msgpack.decode(payload)[1]
    return made


def dynamo() -> NamedWire:
    return NamedWire(DynamoWire(tokens_published=True), NAMES)


def mooncake() -> NamedWire:
    return NamedWire(MooncakeWire("worker-0"), NAMES)


# -- whose ------------------------------------------------------------------------------------------------------------


def test_a_namespace_is_of_one_tenant_of_one_issuer_under_one_secret() -> None:
    distinct = {
        NS_ACME,
        NS_GLOBEX,
        NAMES.of("https://other.example", "acme"),
        namespaces(2).of(ISSUER, "acme"),
        NAMES.of(ISSUER + "acme", ""),
    }
    assert len(distinct) == 5 and all(len(one) == 32 and "acme" not in one for one in distinct)
    assert namespaces().of(ISSUER, "acme") == NS_ACME


@pytest.mark.parametrize(
    ("more", "owner"),
    [
        ({"scope": ScopeKind.TENANT}, NamedRequester(ISSUER, "acme")),
        ({"scope": ScopeKind.TENANT, "salt": "mine"}, None),
        ({"scope": ScopeKind.TENANT, "salt": "epoch-0123"}, NamedRequester(ISSUER, "acme")),
        ({"scope": ScopeKind.SUBJECT, "subject": "alice"}, NamedRequester(ISSUER, "acme", "alice")),
        ({"scope": ScopeKind.SUBJECT, "subject": "alice", "salt": "mine"}, None),
        ({"scope": ScopeKind.SESSION, "session": "chat"}, NamedRequester(ISSUER, "acme", None, "chat")),
        (
            {"scope": ScopeKind.SESSION, "session": "chat", "subject": "alice"},
            NamedRequester(ISSUER, "acme", "alice", "chat"),
        ),
        ({"scope": ScopeKind.SEGMENT, "segment": "prompt"}, None),
        ({"scope": ScopeKind.PUBLIC, "issuer": None, "tenant": None}, None),
    ],
)
def test_only_what_every_request_of_a_name_may_use_has_an_owner(more: Any, owner: Any) -> None:
    fields: dict[str, Any] = {"issuer": ISSUER, "tenant": "acme", **more}
    spec = DomainSpec(classification="internal", model=bytes(32), key_epoch=1, **fields)
    label = DomainLabel("acme", "internal", 1, spec.scope.value, spec.subject, spec.session, spec)
    scope = scope_of(Domain(9, None, label=label), 4)  # type: ignore[arg-type]
    assert scope.owner == owner
    for wire in (dynamo(), mooncake()):
        events = told(wire, some_stored(scope=scope), some_removed(scope=scope))
        assert bool(events) is (owner is not None)


# -- Dynamo -----------------------------------------------------------------------------------------------------------


def test_dynamos_stores_name_their_namespace() -> None:
    stored, removed, clear = told(
        dynamo(), some_stored(5, 2, ACME, parent=key(4)), some_removed(5, 2, ACME), cleared(5, "reset")
    )
    assert stored["type"] == "BlockStored" and stored["cache_salt"] == NS_ACME
    assert stored["token_ids"] == [TOKEN_CANARY] * 8 and stored["block_size"] == 4
    assert stored["block_hashes"] == removed["block_hashes"]
    assert stored["parent_block_hash"] == int.from_bytes(key(4)[:8], "big", signed=True)
    assert "pepper-of-acme" not in str(stored), "the caller's own salt stays here"
    assert clear["type"] == "AllBlocksCleared"
    (foreign,) = told(dynamo(), some_stored(5, 2, GLOBEX))
    assert foreign["cache_salt"] == NS_GLOBEX


def test_dynamo_is_told_nothing_it_cannot_scope_or_index() -> None:
    assert told(dynamo(), some_stored(scope=UNOWNED), some_removed(scope=UNOWNED)) == []
    assert told(dynamo(), some_stored(scope=ACME)._replace(tokens=())) == []
    with pytest.raises(ConfigError, match="kv_events_tokens"):
        DynamoWire(tokens_published=False)
    for form in ("dynamo", "mooncake"):
        with pytest.raises(ConfigError, match="namespaces"):
            EventPublisher("tcp://127.0.0.1:0", form=form, tokens_published=True)  # type: ignore[arg-type]


def store(**more: Any) -> dict[str, Any]:
    return {"type": "BlockStored", "block_hashes": [1], "token_ids": [1], "block_size": 1, **more}


PASSED = [
    store(cache_salt="s"),
    {"type": "BlockRemoved", "block_hashes": [1]},
    {"type": "AllBlocksCleared"},
    ["BlockRemoved", [1]],
    ["AllBlocksCleared"],
]
REFUSED = [
    store(),
    store(cache_salt=""),
    store(cache_salt=None),
    store(extra_keys=[["s"]]),
    store(cache_salt=7),
    ["BlockStored", [1], None, [1], 1, None, "GPU", None, [["s"]]],
    ["BlockStored", [1], None, [1], 1, None, "GPU", {"cache_salt": "s"}],
    ["BlockMoved", [1]],
    {"type": "BlockMoved", "cache_salt": "s"},
    {"event_type": "stored", "tenant_id": "s", "cache_salt": "s"},
    [],
    {},
    None,
]


def test_screening_passes_scoped_stores_and_ends_alone() -> None:
    screened = screen(pack([1.0, [*REFUSED, *PASSED], 0]))
    assert [msgspec.msgpack.decode(one) for one in screened.events] == PASSED
    assert screened.refused == len(REFUSED)
    assert screen(b"\xc1") == ((), 1)
    ours = dynamo().payload_of([some_stored(scope=ACME), cleared(1, "x")], 1.0, 0, "", tokens_published=True)
    assert screen(ours).refused == 0 and len(screen(ours).events) == 2


@settings(max_examples=200, deadline=None)
@given(payload=st.binary(max_size=200))
def test_any_bytes_are_screened(payload: bytes) -> None:
    for event in screen(payload).events:
        assert b"BlockStored" not in event or b"cache_salt" in event


# -- Mooncake: written ------------------------------------------------------------------------------------------------

ENVELOPE = {
    *("event_id", "timestamp", "event_type", "model_name", "block_size", "additional_salt"),
    *("lora_name", "tenant_id", "backend_id", "medium", "dp_rank"),
}  # of the documentation


def test_mooncakes_events_have_its_documented_fields_and_no_alias() -> None:
    clear, stored, removed = told(mooncake(), some_stored(5, 2, ACME, parent=key(4)), some_removed(5, 2, ACME))
    assert set(clear) == ENVELOPE | {"kvcustody"}
    assert set(stored) == ENVELOPE | {"seq_hashes", "base_block_idx", "parent_hash", "token_ids", "kvcustody"}
    assert set(removed) == ENVELOPE | {"seq_hashes", "base_block_idx", "kvcustody"}
    assert [one["event_type"] for one in (clear, stored, removed)] == ["cleared", "stored", "removed"]
    for event in (clear, stored, removed):
        assert event["tenant_id"] == event["additional_salt"] == NS_ACME
        assert event["medium"] == "gpu" and event["backend_id"] == "worker-0" and event["timestamp"] == 1500
    assert stored["seq_hashes"] == removed["seq_hashes"] == [int.from_bytes(key(n)[:8], "big") for n in (5, 6)]
    assert stored["parent_hash"] == int.from_bytes(key(4)[:8], "big") and stored["block_size"] == 4
    assert told(mooncake(), some_stored(scope=ACME))[1]["base_block_idx"] == 0


def test_token_ids_are_told_only_where_published() -> None:
    assert told(mooncake(), some_stored(scope=ACME), published=False)[1]["token_ids"] is None
    assert told(mooncake(), some_stored(scope=ACME))[1]["token_ids"] == [TOKEN_CANARY] * 8


def test_a_stream_begins_with_a_clear_and_numbers_its_own_events() -> None:
    wire = mooncake()
    events = told(wire, some_stored(0, 1, ACME), some_stored(1, 1, GLOBEX), some_removed(0, 1, ACME))
    events += told(wire, some_stored(2, 1, ACME, medium="CPU"), some_stored(3, 1, ACME), cleared(5, "reset"))
    streams: dict[tuple[str, str], list[str]] = {}
    for event in events:
        of = streams.setdefault((event["tenant_id"], event["medium"]), [])
        assert event["event_id"] == len(of)
        of.append(event["event_type"])
    assert streams == {
        (NS_ACME, "gpu"): ["cleared", "stored", "removed", "stored", "cleared"],
        (NS_GLOBEX, "gpu"): ["cleared", "stored", "cleared"],
        (NS_ACME, "cpu"): ["cleared", "stored", "cleared"],
    }
    assert told(mooncake(), some_stored(scope=ACME)._replace(lora_name="sql")) == []


class StandardIndex:
    """An index as Mooncake's documentation has it: prefixes of tokens, by tenant. `registered`: one tenant for all."""

    def __init__(self, registered: str | None = None) -> None:
        self._registered = registered
        self._held: dict[tuple[str, int], tuple[int, ...]] = {}

    def apply(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            tenant = self._registered or event["tenant_id"]
            if event["event_type"] == "cleared":
                self._held = {place: held for place, held in self._held.items() if place[0] != tenant}
            elif event["event_type"] == "removed":
                for one in event["seq_hashes"]:
                    self._held.pop((tenant, one), None)
            else:
                before = self._held.get((tenant, event["parent_hash"] or 0), ())
                size = event["block_size"]
                for at, one in enumerate(event["seq_hashes"], 1):
                    self._held[tenant, one] = (*before, *(event["token_ids"] or [])[: at * size])

    def found(self, tenant: str, tokens: list[int]) -> int:
        mine = [held for place, held in self._held.items() if place[0] == tenant and held]
        return max((len(held) for held in mine if list(held) == tokens[: len(held)]), default=0)


def test_an_index_of_the_documented_kind_finds_own_prompts_alone() -> None:
    prompt = [TOKEN_CANARY] * 8
    wire = mooncake()
    events = told(wire, some_stored(0, 2, ACME))
    index = StandardIndex()
    index.apply(events)
    assert (index.found(NS_ACME, prompt), index.found(NS_GLOBEX, prompt)) == (8, 0)
    index.apply(told(wire, some_removed(0, 2, ACME)))
    assert index.found(NS_ACME, prompt) == 0
    everybody = StandardIndex("default")  # the control: a registration that names one tenant for the stream
    everybody.apply(events)
    assert everybody.found("default", prompt) == 8
    withheld = StandardIndex("default")
    withheld.apply(told(mooncake(), some_stored(0, 2, ACME), published=False))
    assert withheld.found("default", prompt) == 0


# -- Mooncake: read ---------------------------------------------------------------------------------------------------

DOCUMENTED: dict[str, Any] = {
    "event_id": 42,
    "timestamp": 1739145600000,
    "event_type": "stored",
    "model_name": "llama-3.1-8b",
    "block_size": 64,
    "additional_salt": None,
    "lora_name": None,
    "tenant_id": "default",
    "backend_id": "worker-0",
    "medium": "gpu",
    "dp_rank": 0,
    "seq_hashes": [1234567890, 9876543210, 1122334455],
    "base_block_idx": 5,
    "parent_hash": 9999999999,
    "token_ids": None,
}
_BARE = {name: value for name, value in DOCUMENTED.items() if name in ENVELOPE}
DOCUMENTED_REMOVED = {**_BARE, "event_id": 43, "event_type": "removed", "seq_hashes": [1122334455]}
DOCUMENTED_CLEARED = {**_BARE, "event_id": 44, "event_type": "cleared"}


def of_the_master(tenant: str, object_key: str, *, stored: bool = True, aliases: bool = True) -> dict[str, Any]:
    """A map as the master's source packs it, for a key that is no number."""
    event: dict[str, Any] = {"event_id": 1, "timestamp": 1739145600000}
    event["event_type"] = "stored" if stored else "removed"
    if aliases:
        event |= {"type": "BlockStored" if stored else "BlockRemoved"}
    event |= dict.fromkeys(("model_name", "block_size", "additional_salt", "lora_name"))
    event |= {"tenant_id": tenant, "backend_id": "pool", "group_id": None, "medium": "cpu", "dp_rank": None}
    event |= {"object_key": object_key, "seq_hashes": []}
    if aliases:
        event |= {"block_hashes": []}
    if not stored:
        return {**event, "base_block_idx": None}
    event |= {"base_block_idx": 0, "parent_hash": None, "token_ids": None}
    return {**event, "parent_block_hash": None} if aliases else event


def test_the_documented_events_are_read() -> None:
    read = incoming.read(pack([1739145600000, [DOCUMENTED, DOCUMENTED_REMOVED, DOCUMENTED_CLEARED], 0]))
    stored, removed, clear = read.events
    assert isinstance(stored, incoming.StoredBlocks) and len(set(stored.hashes)) == 3
    assert stored.salts == ("default",) and stored.medium == "GPU" and stored.parent is not None
    assert isinstance(removed, incoming.Removed) and removed.hashes == [stored.hashes[2]]
    assert clear == incoming.ClearedTenant("GPU", ("default",), None)
    assert read.utc_us == 1739145600000000 and not read.malformed and not read.unknown


@pytest.mark.parametrize("aliases", [True, False])
def test_the_masters_events_are_read_by_tenant_and_key(aliases: bool) -> None:
    long = "e3b0c442" * 8 + "_0_k"
    batch = [of_the_master(tenant, long, aliases=aliases) for tenant in ("acme", "beta")]
    batch.append(of_the_master("acme", long, stored=False, aliases=aliases))
    read = incoming.read(pack([1739145600000, batch, 0]))
    acme, beta, gone = read.events
    assert isinstance(acme, incoming.StoredBlocks) and isinstance(beta, incoming.StoredBlocks)
    assert acme.hashes != beta.hashes and (acme.salts, beta.salts) == (("acme",), ("beta",))
    assert isinstance(gone, incoming.Removed) and gone.hashes == acme.hashes and acme.medium == "CPU"
    assert not read.malformed and not read.unknown


def test_ours_are_read_back_without_token_ids() -> None:
    payload = mooncake().payload_of(
        [some_stored(scope=ACME), some_removed(scope=ACME)], 1.5, 0, "inc", tokens_published=True
    )
    read = incoming.read(payload)
    kinds = [type(event).__name__ for event in read.events]
    assert kinds == ["ClearedTenant", "StoredBlocks", "Removed"] and not read.malformed
    assert str(TOKEN_CANARY) not in repr(read) and read.events[1].custody.tenant == "acme"  # type: ignore[union-attr]
    assert read.events[1].hashes == read.events[2].hashes  # type: ignore[union-attr]


def test_what_cannot_be_read_is_counted() -> None:
    bad = [{**DOCUMENTED, "seq_hashes": "x"}, {"event_type": "stored"}, {**DOCUMENTED, "seq_hashes": []}]
    read = incoming.read(pack([1739145600000, [*bad, {"event_type": "moved"}, DOCUMENTED], 0]))
    assert len(read.events) == 1 and read.malformed == len(bad) and read.unknown == 1


def test_keys_of_two_tenants_never_meet() -> None:
    read = incoming.read(pack([1, [DOCUMENTED, {**DOCUMENTED, "tenant_id": "other"}], 0]))
    first, second = read.events
    assert not set(first.hashes) & set(second.hashes)  # type: ignore[union-attr]
