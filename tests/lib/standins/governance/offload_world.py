"""A worker with tiers over real tensors, and an engine that writes what its prompts say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from kvcustody.allocator.pool.tensor_memory import TensorMemory, TensorSpec
from kvcustody.clock import VirtualClock
from kvcustody.governance.admission_outcome import Admission
from kvcustody.governance.decisions.segment_matcher import declare
from kvcustody.governance.identity.domain_spec import tenant_owner
from kvcustody.governance.identity.principal import Principal, identify
from kvcustody.governance.observability.prefill_cost import DeclaredRate
from kvcustody.governance.settings import Settings
from kvcustody.governance.tiers.tier import SealedTier
from kvcustody.governance.worker.worker import MemoryPlan, Worker, open_worker
from kvcustody.testkit.tiny_model import tiny_model
from standins import builders

BLOCKS, TOKENS = 24, 16
SPEC = TensorSpec(layers=2, kv_heads=1, head_dim=8, dtype=torch.float16)
MODEL = tiny_model()
POLICY = """
schema: kvcustody/policy@1
name: tiers
profile: shared
scope: tenant
classifications: [public, internal]
classify: [{tenant: "*", as: internal}]
tenants:
  acme: {quota: {guaranteed: 0%, cap: 100%}}
  beta: {quota: {guaranteed: 0%, cap: 100%}}
rules: [{id: own, effect: permit, action: reuse, when: {reader: owner}}]
retention:
  public: {idle: 10m, absolute: 1h, active_max: 1h}
  internal: {idle: 10m, absolute: 1h, active_max: 1h}
scrub: {default: {within: 2s, verify: 1/64}}
offload: {public: never, internal: {tiers: [host, nvme], encrypt: required}}
audit: {on_outage: {decisions: deny, lifecycle: spill, own_hits: aggregate}}
"""


class World:
    """A worker with tiers, and an engine that writes bytes that its prompt's tokens say."""

    def __init__(
        self, folder: Path, tiers: str, *, host_bytes: int = 1 << 20, clock: VirtualClock | None = None
    ) -> None:
        self.folder = folder
        self.clock = clock or VirtualClock()
        self.policy = POLICY
        self.set: dict[str, object] = {}
        if "host" in tiers:
            self.set["host_tier_bytes"] = host_bytes
        if "nvme" in tiers:
            self.set |= {"nvme_tier_path": folder / "tier", "nvme_tier_bytes": 1 << 20}
        self.open()

    def open(self) -> None:
        (self.folder / "policy.yaml").write_text(self.policy, encoding="utf-8")
        settings = Settings(
            **builders.worker_files(self.folder),
            shred_keys_path=self.folder / "shred.keys",
            tier_object_blocks=4,
            tier_timeout_ms=5000,
            **self.set,  # type: ignore[arg-type]
        )
        memories: list[TensorMemory] = []

        def make(blocks: int) -> TensorMemory:
            memories.append(TensorMemory.allocate(blocks, SPEC))
            return memories[-1]

        size = TensorMemory.allocate(1, SPEC).bytes_per_block
        self.worker: Worker = open_worker(settings, MemoryPlan(make, BLOCKS, 1, size), clock=self.clock)
        if self.worker.governor.offload is not None:  # nothing is computed here, and time stands still
            self.worker.governor.offload.transfers.cost = DeclaredRate(1)
        self.memory = memories[0]
        self.size = size

    @property
    def tiers(self) -> list[SealedTier]:
        assert self.worker.governor.offload is not None
        return self.worker.governor.offload.tiers

    def content(self, tokens: list[int], block: int) -> bytes:
        """What the K/V of a block is: a function of all tokens until its end."""
        seed = hash(tuple(tokens[: TOKENS * (block + 1)])) & 0xFFFFFFFF
        return np.random.default_rng(seed).bytes(self.size)

    def serve(self, tenant: str, tokens: list[int], *, subject: str | None = None) -> int:
        """One request to its end; returns its cached tokens, and checks that the blocks under them are right."""
        governor = self.worker.governor
        admitted = governor.admit(who(tenant, subject), MODEL, tokens)
        assert isinstance(admitted, Admission), admitted
        hit = admitted.hit_tokens // TOKENS
        for block, index in enumerate(admitted.blocks[: len(tokens) // TOKENS].tolist()):
            wanted = self.content(tokens, block)
            if block < hit:
                read = bytearray(self.size)
                self.memory.read(0, np.array([index]), memoryview(read))
                assert bytes(read) == wanted, f"block {block} of {tenant} is not what was written"
            else:
                self.memory.write(0, np.array([index]), memoryview(bytearray(wanted)))
        governor.commit([admitted.request_id], [len(tokens)])
        governor.release(admitted.request_id)
        governor.step()
        assert governor.check() == []
        return admitted.hit_tokens

    def crowd(self, seed: int = 0) -> None:
        """Others' prompts, until nothing of before is on the device."""
        for number in range(3):
            self.serve("beta", prompt(1000 + 10 * seed + number, 16))


def who(tenant: str, subject: str | None = None) -> Principal:
    return identify(issuer="idp", tenant=tenant, verified={"subject": subject} if subject else {})


def prompt(seed: int, blocks: int, extra: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(0, 30_000, blocks * TOKENS + extra).tolist()


PREFIX = 8  # blocks of the segment
SHARED = prompt(1, PREFIX, 0)


class SharedWorld(World):
    """`acme` declares a prefix for `beta`; `gamma` is nobody that it names."""

    def share(self, more: str = "", *, classified: str = "internal") -> None:
        """Run under a policy with the segment, which is made with the tenant's own secret."""
        keyring = self.worker.governor.keyring
        made = declare(keyring, tenant_owner("idp", "acme"), SHARED, model=MODEL.digest, block_tokens=TOKENS)
        self.worker.close()
        named = "  gamma: {quota: {guaranteed: 0%, cap: 100%}}\nrules:"
        self.policy = POLICY.replace("rules:", named) + (
            f"segments: [{{id: s, owner: acme, tenants: [acme, beta], digest: 'hmac:{made.digest}', "
            f"tokens: {made.tokens}, classification: {classified}, expires: 2027-01-01}}]\n{more}"
        )
        self.open()

    def crowd(self, seed: int = 0) -> None:
        for number in range(3):
            self.serve("gamma", prompt(1000 + 10 * seed + number, 16))

    def is_granted(self, reader: str, seeds: range) -> bool:
        """Whether `reader` comes to read what `acme` computed: a first use is put on record, and computed."""
        for seed in seeds:
            self.serve("acme", prompt(seed, 2))
            if self.serve(reader, prompt(seed, 2) + prompt(seed + 1, 1)) == 2 * TOKENS:
                return True
            self.worker.governor.settle()
            assert self.worker.writer.flush()
        return False

    def restored(self) -> int:
        assert self.worker.governor.offload is not None
        return sum(use.restored_blocks for use in self.worker.governor.offload.transfers.uses())
