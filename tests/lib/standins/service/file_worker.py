"""A worker with a policy from a file, as a process of its own for tests that kill it: `file_worker.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from kvcustody.allocator.pool.tensor_memory import TensorMemory, TensorSpec
from kvcustody.governance.settings import Settings
from kvcustody.governance.worker.worker import MemoryPlan, Worker, open_worker

SPEC = TensorSpec(layers=1, kv_heads=1, head_dim=8, dtype=torch.float16)


def open_file_worker(folder: Path, name: str = "gpu-0", policy: str = "policy.yaml") -> Worker:
    """A worker on the ledger of the folder; nothing is released anywhere."""
    size = TensorMemory.allocate(1, SPEC).bytes_per_block
    settings = Settings(
        policy_path=folder / policy,
        database_url=f"sqlite:///{folder / 'ledger.db'}",
        spill_path=folder / name,
        root_key_path=folder / f"{name}.root",
        keyring_path=folder / f"{name}.keys",
        signing_key_path=folder / "signing.key",
        worker_name=name,
    )
    memory = MemoryPlan(lambda blocks: TensorMemory.allocate(blocks, SPEC), 64, 1, size)
    return open_worker(settings, memory)


def main() -> None:
    with open_file_worker(Path(sys.argv[1])):
        print("ready", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
