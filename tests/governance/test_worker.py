"""A worker opened from settings: real tensors, a real ledger, a real key file; and what it refuses."""

from pathlib import Path

import numpy as np
import orjson
import pytest
import torch
from sqlalchemy import select
from structlog.testing import capture_logs

from kvcustody.allocator.pool.tensor_memory import TensorMemory, TensorSpec
from kvcustody.audit.leaf.change_items import plain_bodies
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.ledger import events
from kvcustody.clock import SystemClock
from kvcustody.errors import ConfigError, CustodyError
from kvcustody.governance.identity.principal import identify
from kvcustody.governance.keys.shred_keys import ShredKeys, read_shred_keys
from kvcustody.governance.settings import Settings
from kvcustody.governance.worker.plugins import open_root_key
from kvcustody.governance.worker.worker import MemoryPlan, open_worker
from kvcustody.policies import library
from kvcustody.testkit.tiny_model import tiny_model
from standins import builders

BLOCKS = 64
SPEC = TensorSpec(layers=2, kv_heads=1, head_dim=8, dtype=torch.float16)
MODEL = tiny_model()


def settings(folder: Path, **values: object) -> Settings:
    policy = folder / "policy.yaml"
    policy.write_text(library.source("single-org"), encoding="utf-8")
    defaults: dict[str, object] = {
        **builders.worker_files(folder),
        "policy_path": policy,
    }
    return Settings(**(defaults | values))  # type: ignore[arg-type]


def memory_plan(made: list[TensorMemory]) -> MemoryPlan:
    def make(blocks: int) -> TensorMemory:
        made.append(TensorMemory.allocate(blocks, SPEC))
        made[-1].fill(np.arange(blocks), 0xAB)  # what another process left behind
        return made[-1]

    size = TensorMemory.allocate(1, SPEC).bytes_per_block
    return MemoryPlan(make, BLOCKS, 1, size)


def kinds(folder: Path) -> list[str]:
    engine = open_store(folder / "ledger.db", read_only=True)
    with engine.connect() as connection:
        leaves = connection.execute(select(events.c.leaf).order_by(events.c.idx)).scalars().all()
    engine.dispose()
    return [body["kind"] for leaf in leaves for body in plain_bodies(orjson.loads(leaf))]


def test_a_worker_serves_and_leaves_zeroed_memory_and_complete_evidence(tmp_path: Path) -> None:
    memories: list[TensorMemory] = []
    prompt = list(range(1, 100))
    person = identify(issuer="idp", tenant="org", verified={"subject": "ada"})
    with open_worker(settings(tmp_path), memory_plan(memories)) as worker:
        governor = worker.governor
        for expected in (0, 96):
            admission = governor.admit(person, MODEL, prompt)
            assert admission.hit_tokens == expected
            memories[0].fill(admission.blocks[expected // 16 :], 0xCD)
            governor.commit([admission.request_id], [len(prompt)])
            assert governor.release(admission.request_id)
            governor.step()
        assert governor.check() == []
    (memory,) = memories
    assert memory.nonzero_bytes(np.arange(BLOCKS)) == 0
    found = kinds(tmp_path)
    needed = {"worker-started", "policy-activated", "key-event", "custody-ended", "receipt", "worker-stopped"}
    assert needed < set(found)
    assert found.count("residency-opened") == found.count("residency-released") == 2


def test_a_worker_that_stopped_in_order_is_not_closed_as_dead_by_its_successor(tmp_path: Path) -> None:
    for _ in range(2):
        with open_worker(settings(tmp_path), memory_plan([])):
            pass
    assert "worker-died" not in kinds(tmp_path)


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        ({"policy_path": Path("missing.yaml")}, ConfigError, "missing.yaml"),
        ({"profile": "strict"}, ConfigError, "promises `strict`"),
        ({"root_key_source": "file"}, CustodyError, "does not exist"),
        ({"database_url": "sqlite:////proc/nowhere/ledger.db"}, CustodyError, "no ledger here"),
    ],
)
def test_what_cannot_be_opened_is_named_and_nothing_stays_open(
    tmp_path: Path, values: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        open_worker(settings(tmp_path, **values), memory_plan([]))
    with open_worker(settings(tmp_path), memory_plan([])) as worker:  # no lock or file was left behind
        assert worker.governor.check() == []


@pytest.mark.parametrize(
    ("written", "count"), [("{tiers: [host], encrypt: none}", 0), ("{tiers: [host], encrypt: required}", 1)]
)
def test_a_start_says_what_in_the_policy_does_nothing(tmp_path: Path, written: str, count: int) -> None:
    asked = settings(tmp_path)
    text = library.source("single-org").replace("public:       never", f"public: {written}")
    (tmp_path / "policy.yaml").write_text(text, encoding="utf-8")
    with capture_logs() as logs, open_worker(asked, memory_plan([])):
        pass
    found = [line for line in logs if line["event"] == "policy field without effect"]
    assert len(found) == count and all(
        "nothing is offloaded to `host`: no such tier is configured" in line["why"] for line in found
    )


@pytest.mark.parametrize("put_back", [True, False], ids=["put back", "control: as it was left"])
def test_a_start_puts_keys_on_record_that_were_destroyed_and_are_there_again(tmp_path: Path, put_back: bool) -> None:
    chosen = settings(tmp_path, host_tier_bytes=1 << 20, shred_keys_path=tmp_path / "shred.keys")
    with open_worker(chosen, memory_plan([])):
        pass
    keys = ShredKeys.open(chosen.shred_keys_path, open_root_key(chosen), SystemClock())
    key = keys.of_subject(b"ada")
    copy = chosen.shred_keys_path.read_bytes()
    keys.destroy(key.id)
    keys.close()
    if put_back:
        chosen.shred_keys_path.write_bytes(copy)
    with open_worker(chosen, memory_plan([])):
        pass
    assert kinds(tmp_path).count("orphan-found") == put_back
    assert [one for one in read_shred_keys(chosen.shred_keys_path) if one.id == key.id] == []
