"""Our serde for LMCache's own adapters: what opens, what does not, what ends it; beside LMCache's `aesgcm`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc
from lmcache.v1.distributed.serde.aesgcm import AesGcmDeserializer, AesGcmSerializer
from lmcache.v1.distributed.serde.key_provider import HkdfKeyProvider
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

from kvcustody.errors import CustodyError
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.identity.domain_spec import tenant_owner
from kvcustody.governance.restriction.restricted_subjects import (
    RESTRICTED,
    RestrictedSubject,
    RestrictedSubjects,
)
from kvcustody.integrations.lmcache.sealed_serde import (
    SealedDeserializer,
    SealedProcessor,
    SealedSerializer,
    make_serde,
)
from standins.engines.lmcache.chunk_world import SHAPE, ChunkWorld, chunk, content, key

LAYOUT = MemoryLayoutDesc(shapes=[torch.Size(SHAPE)], dtypes=[torch.float16])


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChunkWorld]:
    made = ChunkWorld(tmp_path, monkeypatch)
    for name in ("KVCUSTODY_NVME_TIER_PATH", "KVCUSTODY_NVME_TIER_BYTES"):
        monkeypatch.delenv(name)
    yield made
    made.close()


@pytest.fixture
def serde(world: ChunkWorld) -> Iterator[SealedProcessor]:
    made = make_serde({})
    yield made
    made.close()


def frame(size: int) -> TensorMemoryObj:
    """Memory for an object."""
    raw = torch.zeros(size, dtype=torch.uint8)
    return TensorMemoryObj(raw, MemoryObjMetadata(raw.shape, torch.uint8, 0, size, 1, fmt=MemoryFormat.BINARY), None)


def sealed(serde: SealedProcessor, seed: int, named: object) -> TensorMemoryObj:
    into = frame(serde.estimate_serialized_size(LAYOUT))
    written = SealedSerializer(serde.custody).serialize(chunk(seed), into, named)
    assert written == len(content(into))
    return into


def opened(serde: SealedProcessor, one: TensorMemoryObj, named: object) -> bytes | None:
    into = chunk(99)
    try:
        SealedDeserializer(serde.custody).deserialize(one, into, named)
    except CustodyError:
        assert not any(content(into)), "what does not open leaves zeros"
        return None
    return content(into)


def test_it_opens_under_its_own_name_alone(world: ChunkWorld, serde: SealedProcessor) -> None:
    mine, theirs = world.salt("acme"), world.salt("beta")
    stored = sealed(serde, 1, key(1, mine))
    assert opened(serde, stored, key(1, mine)) == content(chunk(1))
    assert content(chunk(1))[:64] not in content(stored)
    others = [
        key(2, mine),
        key(1, mine, model="tiny2"),
        key(1, mine, rank=1),
        key(1, theirs),
        key(1, "ab" * 32),
    ]
    assert [opened(serde, stored, named) for named in others] == [None] * 5


def test_lmcaches_own_serde_opens_another_chunk_model_and_rank(world: ChunkWorld) -> None:
    """The positive control: `aesgcm` binds its key to the salt, and nothing to the name."""
    keys = HkdfKeyProvider(os.urandom(32), key_len=32, info_prefix=b"control")
    salt = world.salt("acme")
    into = frame(AesGcmSerializer(keys).estimate_serialized_size(LAYOUT))
    AesGcmSerializer(keys).serialize(chunk(1), into, key(1, salt))
    for named in (key(2, salt), key(1, salt, model="tiny2"), key(1, salt, rank=1)):
        back = chunk(99)
        AesGcmDeserializer(keys).deserialize(into, back, named)
        assert content(back) == content(chunk(1))


def test_every_flipped_bit_is_found(world: ChunkWorld, serde: SealedProcessor) -> None:
    named = key(1, world.salt("acme"))
    stored = sealed(serde, 1, named)
    data = stored.byte_array
    size = len(content(stored))
    for bit in [*range(0, 8 * 400, 7), *range(8 * 400, 8 * size, 8 * 997)]:
        view = memoryview(data).cast("B")
        view[bit // 8] ^= 1 << bit % 8
        assert opened(serde, stored, named) is None, bit
        view[bit // 8] ^= 1 << bit % 8
    assert opened(serde, stored, named) == content(chunk(1))


def test_a_deadline_ends_it_and_so_does_a_policy_that_keeps_it_here(world: ChunkWorld, serde: SealedProcessor) -> None:
    brief, long = key(1, world.salt("brief", classification="brief")), key(1, world.salt("acme"))
    first, second = sealed(serde, 1, brief), sealed(serde, 2, long)
    assert opened(serde, first, brief) is not None
    time.sleep(2.2)
    assert (opened(serde, first, brief), opened(serde, second, long)) == (None, content(chunk(2)))
    with pytest.raises(CustodyError, match="keeps `restricted`"):
        sealed(serde, 3, key(3, world.salt("secret", classification="restricted")))


def test_an_erased_subjects_and_a_destroyed_tenants_objects_open_nowhere(
    world: ChunkWorld, serde: SealedProcessor
) -> None:
    one, other, theirs = (key(1, world.salt(*whose)) for whose in (("acme", "one"), ("acme", "two"), ("beta", "one")))
    objects = [sealed(serde, number + 1, named) for number, named in enumerate((one, other, theirs))]
    governor = serde.custody.worker.governor
    governor.call(lambda mine: mine.erase(Selector("acme", "one", None))).result(10)
    assert opened(serde, objects[0], one) is None
    assert opened(serde, objects[1], other) == content(chunk(2))
    world.keyring.destroy(tenant_owner("api-keys", "beta"), 1)
    assert opened(serde, objects[2], theirs) is None
    assert opened(serde, objects[1], other) == content(chunk(2))


def test_a_restricted_subjects_objects_are_neither_sealed_nor_opened_until_it_is_lifted(
    world: ChunkWorld, serde: SealedProcessor
) -> None:
    restricted, other = (key(1, world.salt(*whose)) for whose in (("acme", "one"), ("acme", "two")))
    objects = [sealed(serde, number + 1, named) for number, named in enumerate((restricted, other))]
    assert opened(serde, objects[0], restricted) == content(chunk(1)), "control"
    governor = serde.custody.worker.governor

    def restrict(*people: RestrictedSubject) -> None:
        governor.call(lambda mine: mine.restrict(RestrictedSubjects(people))).result(10)

    restrict(RestrictedSubject("case-1", "acme", "one"))
    assert opened(serde, objects[0], restricted) is None
    with pytest.raises(CustodyError, match=RESTRICTED):
        sealed(serde, 3, restricted)
    assert opened(serde, objects[1], other) == content(chunk(2)), "control: another subject of the tenant"
    sealed(serde, 4, other)
    restrict()
    assert opened(serde, objects[0], restricted) == content(chunk(1)), "lifted"
    sealed(serde, 3, restricted)


def test_a_serde_entry_that_is_wrong_says_why(world: ChunkWorld) -> None:
    for options in ({"tier": "host"}, {"max_workers": 0}, {"aes_bits": 128}):
        with pytest.raises(CustodyError, match="takes `tier`"):
            make_serde(options)
