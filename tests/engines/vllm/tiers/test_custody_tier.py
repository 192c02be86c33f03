"""The secondary tier that vLLM's own tiering loads by its module's path, over a primary tier of the tests' own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvcustody.clock import SystemClock
from kvcustody.errors import ConfigError
from kvcustody.governance.identity.domain_spec import tenant_owner
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.root_key_wrapping import open_wrapping
from kvcustody.governance.keys.wrapped_key_store import FileKeyStore
from standins.governance.store_servers import StoreServer, ValkeyServer, servers

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
            parallel=SimpleNamespace(world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1),
            groups=(),
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
        """What a look-up answers when every step's questions are answered."""
        answers = self._look()
        if LookupResult.RETRY in answers:
            assert self.tier.has_pending_work()
            self.tier.on_schedule_end(None)
            self.tier.drain_jobs()
            answers = self._look()
        self.tier.on_request_finished(ASKING)
        return [answer is LookupResult.HIT for answer in answers]

    def _look(self) -> list[LookupResult]:
        return [self.tier.lookup(key, ASKING) for key in KEYS]


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
    store = primary.tier._copies.tier._index.store
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
    assert not any(primary.tier._copies.tier._index.store._map[: 2 * SLOT_BYTES])
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
    store = primary.tier._copies.tier._index.store
    (placed,) = store._placed.values()
    store._view[placed.start + 4000] ^= 1
    assert not primary.do(KEYS[:1], [3], load=True).success
    assert not primary.slots[3].any()
    primary.tier.shutdown()


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], StoreServer]]:
    yield from servers(tmp_path_factory)


@pytest.fixture
def shared(
    valkey: Callable[[str], StoreServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Primary]:
    """Makes the engine of a worker whose chunks are in a store that workers share."""
    server = valkey("valkey")
    assert isinstance(server, ValkeyServer)
    url = f"valkey://127.0.0.1:{server.port}/0/{tmp_path.name}"

    def of(worker: str, **given: Any) -> Primary:
        monkeypatch.setenv("KVCUSTODY_WORKER_NAME", worker)
        return Primary(url=url, **given)

    return of


def test_engines_of_one_owner_and_model_share_a_remote_store(shared: Callable[..., Primary]):
    first, second = shared("gpu-1"), shared("gpu-2")
    content = first.fill(0, 0)
    assert second.finds() == [False] * 4, "nobody has stored it"
    assert first.do(KEYS[:1], [0], load=False).success
    assert second.finds() == [False] * 4, "what was not there is not asked for again at once"
    time.sleep(1.1)
    assert second.finds() == [True, False, False, False]
    assert second.do(KEYS[:1], [3], load=True).success
    assert second.slots[3].tobytes() == content
    assert second.tier._copies.tier.counts.stored == 0, "its owner alone has custody"
    for told in ({"owner": "other"}, {"revision": "2"}):
        other = shared("gpu-3", **told)
        assert other.finds() == [False] * 4, told
        other.tier.shutdown()
    first.tier._copies.end_all()
    assert not second.do(KEYS[:1], [4], load=True).success and not second.slots[4].any()
    assert second.finds() == [False] * 4, "a load did not bring it"
    for engine in (first, second):
        engine.tier.shutdown()


def test_a_look_up_is_a_miss_after_the_store_s_deadline(
    shared: Callable[..., Primary], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("KVCUSTODY_REMOTE_TIER_TIMEOUT_MS", "100")
    engine = shared("gpu-1")
    assert engine.tier.lookup(KEYS[0], ASKING) is LookupResult.RETRY
    time.sleep(0.15)
    assert engine.tier.lookup(KEYS[0], ASKING) is LookupResult.MISS
    engine.tier.shutdown()


def test_a_folder_beside_a_store_and_a_worker_without_a_name_are_refused(
    shared: Callable[..., Primary], tmp_path: Path
):
    with pytest.raises(ConfigError, match="name one of both"):
        shared("gpu-1", root_dir=str(tmp_path / "tier"))
    with pytest.raises(ConfigError, match="setting `worker_name`"):
        shared("worker-0")


def test_the_folder_is_also_named_as_vllm_s_own_tier_names_it(tmp_path: Path):
    engine = Primary(root_dir=str(tmp_path / "tier"))
    engine.fill(0, 0)
    assert engine.do(KEYS[:1], [0], load=False).success
    engine.tier.shutdown()
    assert kept(engine, tmp_path)
