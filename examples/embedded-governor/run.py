"""A worker of one's own in forty lines: three requests, what they reused of each other, and the evidence of it.

    pip install './kvcustody[engine]'
    python run.py FOLDER

The second request of the same person finds what the first one computed. The third is of another tenant, asks the same,
and finds nothing. When the worker closes, every block is zero, and the ledger says so.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from kvcustody import MemoryPlan, identify, load_settings, open_worker
from kvcustody.allocator.pool.tensor_memory import TensorMemory, TensorSpec
from kvcustody.lab.replay.run.model_identity import replay_model
from kvcustody.policies import library

PROMPT = list(range(1, 97))  # token ids of six blocks
SPEC = TensorSpec(layers=2, kv_heads=2, head_dim=8, dtype=torch.float16)


def main(folder: Path) -> None:
    """Serve three requests, and print the tokens that each found in the cache."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "policy.yaml").write_text(library.source("regulated-saas"))
    settings = load_settings(
        policy_path=folder / "policy.yaml",
        database_url=f"sqlite:///{folder / 'ledger.db'}",
        spill_path=folder / "spill",
        root_key_path=folder / "root.key",
        keyring_path=folder / "keys.json",
    )
    size = TensorMemory.allocate(1, SPEC).bytes_per_block
    plan = MemoryPlan(lambda blocks: TensorMemory.allocate(blocks, SPEC), 256, 1, size)
    with open_worker(settings, plan) as worker:
        for tenant, subject in (("acme", "ada"), ("acme", "ada"), ("globex", "ada")):
            person = identify(issuer="example", tenant=tenant, verified={"subject": subject})
            admission = worker.governor.admit(person, replay_model(settings.block_tokens), [*PROMPT, 7])
            worker.governor.commit([admission.request_id], [len(PROMPT) + 1])  # an engine computes K/V here
            print(f"{subject} of {tenant}: {admission.hit_tokens} tokens found")
            worker.governor.release(admission.request_id)
            worker.governor.step()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "embedded-governor"))
