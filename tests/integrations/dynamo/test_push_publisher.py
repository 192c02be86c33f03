"""Events handed to Dynamo's own publisher: each store with its tenant's namespace, removals of what was told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvcustody.errors import IsolationError
from kvcustody.governance.edge.current_namespaces import CurrentNamespaces
from kvcustody.governance.edge.erase_epochs import (
    EpochScope,
    EpochTags,
    EraseEpochs,
    KnownEpochs,
    RaisedEpoch,
)
from kvcustody.governance.edge.named_requester import NamedRequester
from kvcustody.integrations.dynamo.push_publisher import PushPublisher
from kvcustody.integrations.events.block_event import (
    BlockEvent,
    EventScope,
    cleared,
    removed,
    stored,
)
from standins.integrations.router_names import lasting_names

ACME = EventScope("acme", "tenant", "internal", 3, 5, NamedRequester("issuer", "acme"))
ALICE = EventScope("acme", "subject", "internal", 4, 5)


class Sink:
    def __init__(self) -> None:
        self.batches: list[list[dict[str, Any]]] = []
        self.broken = False

    def publish_batch(self, events: Sequence[Any], /) -> None:
        if self.broken:
            raise ValueError("no")
        self.batches.append(list(events))


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
def names() -> CurrentNamespaces:
    return lasting_names(bytes(range(32)))


def keys(first: int, count: int) -> bytes:
    return b"".join(number.to_bytes(4, "big") * 8 for number in range(first, first + count))


def some(first: int = 1, scope: EventScope = ACME, **more: Any) -> BlockEvent:
    fields = {"residency": 1, "block_tokens": 2, "tokens": [5, 6, 7, 8], "salt": "own", **more}
    return stored(scope, keys(first, 2), **fields)


def test_a_store_names_its_namespace(sink: Sink, names: CurrentNamespaces) -> None:
    PushPublisher(sink, names).publish([some()])
    ((told,),) = sink.batches
    assert told["cache_salt"] == names.of("issuer", "acme") and told["type"] == "stored"
    assert told["token_ids"] == [5, 6, 7, 8] and told["num_block_tokens"] == [2, 2]
    assert len(told["block_hashes"]) == 2 and told["parent_hash"] is None


def test_what_cannot_be_scoped_is_not_handed_over(sink: Sink, names: CurrentNamespaces) -> None:
    pushed = PushPublisher(sink, names)
    pushed.publish([some(scope=ALICE), some(medium="CPU"), some(group=1), some()._replace(tokens=()), cleared(1, "x")])
    assert sink.batches == []
    with pytest.raises(IsolationError):
        pushed.publish([some()._replace(scope=None)])  # type: ignore[arg-type]


def test_removals_and_clears_end_what_was_told_and_nothing_else(sink: Sink, names: CurrentNamespaces) -> None:
    pushed = PushPublisher(sink, names)
    pushed.publish([some(1), some(3, tokens=[9, 9, 9, 9])])
    pushed.publish([removed(ACME, keys(1, 1), cause="expired"), removed(ACME, keys(9, 1), cause="expired")])
    assert sink.batches[1] == [{"type": "removed", "block_hashes": sink.batches[0][0]["block_hashes"][:1]}]
    pushed.publish([cleared(1, "reset")])
    told = {one for event in sink.batches[0] for one in event["block_hashes"]}
    ended = [one for batch in sink.batches[1:] for event in batch for one in event["block_hashes"]]
    assert set(ended) == told and len(ended) == len(told)


def test_a_refusal_costs_no_step(sink: Sink, names: CurrentNamespaces) -> None:
    pushed = PushPublisher(sink, names)
    sink.broken = True
    assert pushed.publish([some()]) == 0 and pushed.refused_batches == 1
    sink.broken = False
    assert pushed.publish([some()]) == 1 and len(sink.batches) == 1


def test_a_raised_epoch_removes_what_was_told(sink: Sink, names: CurrentNamespaces) -> None:
    pushed = PushPublisher(sink, names)
    pushed.publish([some()])
    tags = EpochTags(bytes(32))
    raised = [RaisedEpoch(1, tags.of(EpochScope("issuer", "acme")))]
    pushed.take_epochs(KnownEpochs(EraseEpochs(raised, version=1), tags))
    assert sink.batches[1] == [{"type": "removed", "block_hashes": sink.batches[0][0]["block_hashes"]}]
    pushed.publish([some()])
    assert sink.batches[2][0]["cache_salt"] != sink.batches[0][0]["cache_salt"]
