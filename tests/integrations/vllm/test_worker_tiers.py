"""The tiers of one worker of vLLM, without vLLM: what is left of keys and threads when they end, or cannot begin."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from kvcustody.allocator.pool.tensor_memory import TensorMemory
from kvcustody.clock import SystemClock
from kvcustody.errors import ConfigError
from kvcustody.governance.settings import load_settings
from kvcustody.governance.tiers.open_tiers import tier_plan
from kvcustody.integrations.vllm.tiers import worker_tiers
from kvcustody.integrations.vllm.tiers.worker_tiers import WorkerKeys, WorkerTiers
from kvcustody.kernels.segment import SegmentTable
from standins.engines.vllm.deployment import Deployment


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
