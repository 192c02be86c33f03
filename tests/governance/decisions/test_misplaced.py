"""A worker refuses what its policy lets other workers alone serve, whoever sent it here, and puts that on record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from sqlalchemy import select

from kvcustody.allocator.pool.tensor_memory import TensorMemory, TensorSpec
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.ledger import events
from kvcustody.governance.admission_outcome import Admission, AdmissionOutcome, AdmissionRefused
from kvcustody.governance.decisions.authority import MISPLACED
from kvcustody.governance.identity.principal import identify
from kvcustody.governance.settings import Settings
from kvcustody.governance.worker.worker import MemoryPlan, Worker, open_worker
from kvcustody.testkit.tiny_model import tiny_model
from standins import builders
from standins.builders import policy

RULES = "placement: [{id: acme-own, groups: [east-1], tenants: [acme], dedicated: true}]\n"
SPEC = TensorSpec(layers=1, kv_heads=1, head_dim=8, dtype=torch.float16)
ASKED = 3
SHARES = {"acme": "{guaranteed: 25%, cap: 75%}", "globex": "{guaranteed: 25%, cap: 75%}"}


def opened(folder: Path, rules: str, group: str) -> Worker:
    (folder / "policy.yaml").write_text(policy(SHARES, more=rules))
    settings = Settings(
        **builders.worker_files(folder),
        placement_group=group,
    )
    size = TensorMemory.allocate(1, SPEC).bytes_per_block
    memory = MemoryPlan(lambda blocks: TensorMemory.allocate(blocks, SPEC), 64, 1, size)
    return open_worker(settings, memory)


def ask(worker: Worker, tenant: str) -> AdmissionOutcome:
    who = identify(issuer="corp", tenant=tenant, verified={"subject": "ann"})
    return worker.governor.admit(who, tiny_model(), range(100))


@pytest.mark.parametrize(
    ("rules", "group", "served"),
    [
        (RULES, "default", {"globex"}),
        (RULES, "west-1", {"globex"}),
        (RULES, "east-1", {"acme"}),
        ("", "default", {"acme", "globex"}),  # the control
    ],
)
def test_a_worker_serves_whom_its_policy_lets_its_group_serve(
    tmp_path: Path, rules: str, group: str, served: set[str]
) -> None:
    with opened(tmp_path, rules, group) as worker:
        for _ in range(ASKED):  # the first makes the tenant's plan, and later ones find it
            answers = {tenant: ask(worker, tenant) for tenant in SHARES}
            assert {tenant for tenant, answer in answers.items() if isinstance(answer, Admission)} == served
            for tenant in SHARES.keys() - served:
                refused = answers[tenant]
                assert isinstance(refused, AdmissionRefused) and refused.reason == MISPLACED
    engine = open_store(tmp_path / "ledger.db")
    with engine.connect() as connection:
        leaves = connection.scalars(select(events.c.leaf).where(events.c.kind == "attempts-refused"))
        said = [json.loads(leaf) for leaf in leaves]
    engine.dispose()
    found = {(leaf["reason"], leaf["source"], leaf["attempts"]) for leaf in said}
    assert found == {("misplaced", tenant, ASKED) for tenant in SHARES.keys() - served}
