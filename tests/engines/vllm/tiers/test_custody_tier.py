"""The secondary tier that vLLM's own tiering loads by its module's path, over a primary tier of the tests' own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvcustody.clock import SystemClock
from kvcustody.governance.identity.domain_spec import tenant_owner
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.root_key_wrapping import open_wrapping
from kvcustody.governance.keys.wrapped_key_store import FileKeyStore

SLOTS, SLOT_BYTES = 8, 8192
CANARY = b"what a prompt says about somebody"
KEYS = [make_offload_key(bytes([number]) * 32, 0) for number in range(4)]
ASKING = ReqContext("r1")


class Primary:
    """vLLM's primary tier as secondary ones see it, and one of those."""

    def __init__(self, **given: Any) -> None:
        self.slots = np.zeros((SLOTS, SLOT_BYTES), dtype=np.int8)
        config = SimpleNamespace(
            model=SimpleNamespace(name="tiny", dtype="bfloat16"),
            cache=SimpleNamespace(tokens_per_hash=32, blocks_per_chunk=4),
            kv_cache_layout="LBHNC",
        )
        self.tier = SecondaryTierFactory.create_secondary_tier(
            {
                "type": "CustodyTier",
                "module_path": "kvcustody.integrations.vllm.tiers.custody_tier",
                "owner": "acme",
                "seconds": 60,
                "size_bytes": 1 << 22,
                **given,
            },
            memoryview(self.slots),
            SimpleNamespace(config=config),
        )
        self.jobs = 0

    def fill(self, slot: int, number: int) -> bytes:
        content = (CANARY + bytes([number])) * (SLOT_BYTES // (len(CANARY) + 1) + 1)
        self.slots[slot] = np.frombuffer(content[:SLOT_BYTES], dtype=np.int8)
        return self.slots[slot].tobytes()

    def do(self, keys: list[Any], slots: list[int], *, load: bool) -> Any:
        self.jobs += 1
        job = TransferJob(self.jobs, keys, np.array(slots), load, ASKING)
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        self.tier.drain_jobs()
        (result,) = self.tier.get_finished_jobs()
        assert result.job_id == self.jobs
        return result

    def finds(self) -> list[bool]:
        return [self.tier.lookup(key, ASKING) is LookupResult.HIT for key in KEYS]


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, file in (("ROOT_KEY", "root.key"), ("KEYRING", "keyring.json"), ("SHRED_KEYS", "shred.keys")):
        monkeypatch.setenv(f"KVCUSTODY_{name}_PATH", str(tmp_path / file))


@pytest.fixture(params=["host", "files"])
def primary(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Primary]:
    made = Primary(**({"path": str(tmp_path / "tier")} if request.param == "files" else {}))
    yield made
    made.tier.shutdown()


def kept(primary: Primary, tmp_path: Path) -> bytes:
    store = primary.tier._copies.tier._store
    files = [path for path in (tmp_path / "tier").rglob("*") if path.is_file()]
    return b"".join(path.read_bytes() for path in files) if files else bytes(store._map[:])


def test_what_is_stored_comes_back_and_rests_sealed(primary: Primary, tmp_path: Path):
    contents = [primary.fill(slot, slot) for slot in range(3)]
    assert primary.do(KEYS[:3], [0, 1, 2], load=False).success
    assert primary.finds() == [True, True, True, False]
    primary.slots[:] = 0
    assert primary.do(KEYS[:3], [5, 6, 7], load=True).success
    assert [primary.slots[slot].tobytes() for slot in (5, 6, 7)] == contents
    assert CANARY in contents[0], "positive control"
    assert CANARY not in kept(primary, tmp_path)


def test_what_is_not_there_is_told_key_by_key(primary: Primary):
    primary.fill(0, 0)
    primary.do(KEYS[:1], [0], load=False)
    result = primary.do(KEYS[:2], [3, 4], load=True)
    assert not result.success
    assert list(result.successful_keys) == KEYS[:1]
    assert not primary.slots[4].any()


def test_copies_end_at_their_deadline(tmp_path: Path):
    primary = Primary(seconds=0.5)
    primary.fill(0, 0)
    primary.do(KEYS[:1], [0], load=False)
    assert primary.finds()[0]
    time.sleep(0.7)
    assert not primary.finds()[0]
    primary.tier.on_schedule_end(None)
    primary.tier.drain_jobs()
    assert not any(primary.tier._copies.tier._store._map[: 2 * SLOT_BYTES])
    assert not primary.do(KEYS[:1], [1], load=True).success
    primary.tier.shutdown()


def test_after_a_restart_files_are_found_by_their_owner_alone(tmp_path: Path):
    folder = str(tmp_path / "tier")
    first = Primary(path=folder)
    content = first.fill(0, 0)
    first.do(KEYS[:1], [0], load=False)
    first.tier.shutdown()
    second = Primary(path=folder)
    assert second.do(KEYS[:1], [3], load=True).success
    assert second.slots[3].tobytes() == content
    second.tier.shutdown()
    other = Primary(path=folder, owner="other")
    assert other.finds() == [False] * 4
    other.tier.shutdown()


def test_destroying_the_owners_epoch_ends_all_of_them(primary: Primary, tmp_path: Path):
    primary.fill(0, 0)
    primary.do(KEYS[:1], [0], load=False)
    assert primary.do(KEYS[:1], [2], load=True).success, "positive control"
    port = open_wrapping("file", tmp_path / "root.key")
    keyring = Keyring(FileKeyStore(tmp_path / "keyring.json"), port, SystemClock())
    keyring.destroy(tenant_owner("vllm", "acme"), 1)
    primary.slots[3] = 0
    assert not primary.do(KEYS[:1], [3], load=True).success
    assert not primary.slots[3].any()
    assert not primary.finds()[0]


def test_changed_bytes_are_a_miss(tmp_path: Path):
    primary = Primary()
    primary.fill(0, 0)
    primary.do(KEYS[:1], [0], load=False)
    store = primary.tier._copies.tier._store
    (placed,) = store._placed.values()
    store._view[placed.start + 4000] ^= 1
    assert not primary.do(KEYS[:1], [3], load=True).success
    assert not primary.slots[3].any()
    primary.tier.shutdown()
