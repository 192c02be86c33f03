"""The tiers of one worker of vLLM, without vLLM: what is left of keys and threads when they end, or cannot begin."""

from __future__ import annotations

import os
import shutil
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from kvcustody.allocator.pool.tensor_memory import TensorMemory
from kvcustody.clock import SystemClock
from kvcustody.errors import ConfigError
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.erasure.tier_protocol import CompletedErasure
from kvcustody.governance.settings import load_settings
from kvcustody.governance.tiers.open_tiers import tier_plan
from kvcustody.governance.tiers.stores.file_store import FileStore
from kvcustody.governance.tiers.tier import CopyLimit, TierShare, TierTerms
from kvcustody.governance.tiers.tier_rules import NOT_HERE
from kvcustody.integrations.vllm.tiers import worker_tiers
from kvcustody.integrations.vllm.tiers.block_bytes import BlockBytes
from kvcustody.integrations.vllm.tiers.copy_directory import CopyDirectory
from kvcustody.integrations.vllm.tiers.tier_messages import CloseTier, CopyJob, CopyReply, CopyRule, OpenTier
from kvcustody.integrations.vllm.tiers.worker_tiers import TierThread, WorkerKeys, WorkerTiers
from kvcustody.kernels.segment import SegmentTable
from standins.engines.vllm.deployment import Deployment
from standins.governance.tier_place import ABSOLUTE_US, BLOCK, LAYOUT, STEP, Place


@pytest.fixture
def open_tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], WorkerTiers]:
    named = Deployment(tmp_path / "site").environment() | {
        "KVCUSTODY_HOST_TIER_BYTES": str(1 << 20),
        "KVCUSTODY_NVME_TIER_PATH": str(tmp_path / "tier"),
        "KVCUSTODY_NVME_TIER_BYTES": str(1 << 20),
    }
    for name, value in named.items():
        monkeypatch.setenv(name, value)

    def make() -> WorkerTiers:
        settings = load_settings()
        plan = tier_plan(settings)
        assert plan is not None
        memory = TensorMemory([SegmentTable.from_tensors([torch.zeros(8, 64, dtype=torch.uint8)])])
        return WorkerTiers(
            settings, plan, memory, shard=0, shards=1, software=(), clock=SystemClock(), stack=ExitStack()
        )

    return make


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> list[WorkerKeys]:
    """Whatever a worker opens."""
    made: list[WorkerKeys] = []
    opens = worker_tiers.open_worker_keys

    def noted(*given: object) -> WorkerKeys:
        made.append(opens(*given))  # type: ignore[arg-type]
        made[-1].shred.of_subject(b"somebody")  # so that there is a secret in memory
        return made[-1]

    monkeypatch.setattr(worker_tiers, "open_worker_keys", noted)
    return made


def tier_threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name in ("kvcustody-host", "kvcustody-nvme")]


def test_every_key_is_wiped_when_they_close(
    open_tiers: Callable[[], WorkerTiers], keys: list[WorkerKeys]
) -> None:
    tiers = open_tiers()
    [opened] = keys
    secrets = list(opened.shred._secrets.values())
    assert secrets and all(one.filled for one in secrets) and len(tier_threads()) == 2, "control"
    tiers.close()
    tiers.close()
    assert not any(one.filled for one in secrets) and tier_threads() == []
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened.shred._file)


def test_what_was_open_is_closed_where_the_rest_cannot_be(
    open_tiers: Callable[[], WorkerTiers], keys: list[WorkerKeys], tmp_path: Path
) -> None:
    (tmp_path / "tier").write_text("no folder")
    with pytest.raises(ConfigError, match="nvme_tier_path"):
        open_tiers()
    [opened] = keys
    assert not opened.shred._secrets and tier_threads() == [], "the host tier had begun"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened.shred._file)
    (tmp_path / "tier").unlink()
    open_tiers().close()


ADA, ACME = Selector(tenant="acme", subject="ada"), Selector(tenant="acme")


@pytest.mark.parametrize("selector", [ADA, ACME], ids=["subject", "tenant"])
@pytest.mark.parametrize("told", [True, False], ids=["told", "control: nobody tells the worker"])
def test_what_an_erasure_destroyed_ends_again_before_a_load(
    tmp_path: Path, selector: Selector, told: bool
) -> None:
    """Tier, keys and receipts are put back. The scheduler tells its workers; it cannot name a tenant's subjects."""
    site, copy = tmp_path / "site", tmp_path / "copy"
    site.mkdir()
    place = Place(site, "nvme")
    labels = [place.label("acme", "ada"), place.label("acme")]
    for label in labels:
        assert place.keep(label, "prompt", STEP) == STEP
    _close(place)
    shutil.copytree(site, copy)
    place.world.open()
    place.open()
    place.tier.erase("e-1", selector, place.world.clock.now_us())
    _close(place)
    shutil.rmtree(site)
    shutil.copytree(copy, site)
    place.world.clock.advance(1_000_000)
    place.world.open()
    complete = CompletedErasure("e-1", selector, place.world.clock.utc_us())
    replies = _replies(place, [complete] if told else [])
    assert replies[0].opened is not None and replies[0].opened.returned_keys == 0, (
        "the receipts went back too"
    )
    assert sum(reply.returned_keys for reply in replies) == 2 * told
    place.open()
    brought = [place.bring(label, "prompt", STEP) for label in labels]
    place.world.close()
    assert brought == ([0, 0] if told else [STEP, STEP])


def _replies(place: Place, completed: list[CompletedErasure]) -> list[CopyReply]:
    """What a worker's thread answers from its opening to its close, with what a directory sends between."""
    jobs: list[CopyJob] = []

    def send(job: CopyJob) -> int:
        jobs.append(job._replace(number=len(jobs) + 1))
        return len(jobs)

    rule = CopyRule(CopyLimit(ABSOLUTE_US, ABSOLUTE_US // 16), TierShare())
    send(OpenTier(0, "nvme", 16, {("acme", "internal"): rule}))
    directory = CopyDirectory("nvme", 1, send)
    for complete in completed:
        assert directory.erase_returned(complete) == 0
    send(CloseTier(0, "nvme"))
    world, replies = place.world, deque[CopyReply]()
    memory = TensorMemory([SegmentTable.from_tensors([torch.zeros(8, BLOCK, dtype=torch.uint8)])])
    terms = TierTerms(LAYOUT, BLOCK, 16, lambda *_: NOT_HERE, object_blocks=STEP)
    thread = TierThread(
        "nvme",
        FileStore(place.folder / "tier", place.capacity),
        WorkerKeys(world.keyring, place.folder / "keys.json", world.shred),
        terms,
        BlockBytes(memory),
        world.clock,
        replies,
    )
    for job in jobs:
        thread.put(job)
    thread.join()
    return list(replies)


def _close(place: Place) -> None:
    place.tier.close()
    place.world.close()
