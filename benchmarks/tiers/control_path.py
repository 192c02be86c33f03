"""CPU time of the engine's control path while copies go to tiers and come back, against a worker without tiers.

    python benchmarks/tiers/control_path.py [--rounds 7] [--json FILE]
    python benchmarks/tiers/control_path.py --profile

The same requests: admitted, committed, extended by 64 tokens, released, a step after each, in a pool that is too small.
Time is that of the calling thread.

- `control`: with tiers ÷ without, where what a transfer itself takes (copy, seal, store; `SealedTier.store` and `load`)
  is left out: look-ups, decisions, expiry and what goes on record are in. The goal is 1.05.
- `--profile`: where the difference goes, by function: calls and microseconds a request with a host tier and without,
  those that it calls included. The profiler itself makes calls dearer; it is for shares, not for the ratio.
- `all`: the same with the transfers, which are made on that thread; `wall`: the same by the clock.
"""

from __future__ import annotations

import cProfile
import pstats
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from kvcustody.allocator.pool.tensor_memory import TensorMemory, TensorSpec
from kvcustody.governance.admission_outcome import Admission
from kvcustody.governance.identity.principal import identify
from kvcustody.governance.observability.prefill_cost import DeclaredRate
from kvcustody.governance.settings import Settings
from kvcustody.governance.tiers.tier import SealedTier
from kvcustody.governance.worker.worker import MemoryPlan, Worker, open_worker
from kvcustody.testkit.tiny_model import tiny_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from bench import Bench, alternate, frozen

GOAL = 1.05
BLOCKS, TOKENS, REQUESTS, DECODED = 1024, 16, 200, 64
SPEC = TensorSpec(layers=2, kv_heads=1, head_dim=8, dtype=torch.float16)
MODEL = tiny_model()
POLICY = """
schema: kvcustody/policy@1
name: control-path
profile: shared
scope: tenant
classifications: [internal]
classify: [{tenant: "*", as: internal}]
tenants: {acme: {quota: {guaranteed: 0%, cap: 100%}}}
rules: [{id: own, effect: permit, action: reuse, when: {reader: owner}}]
retention: {internal: {idle: 10m, absolute: 1h, active_max: 1h}}
scrub: {default: {within: 2s, verify: 1/64}}
offload: {internal: {tiers: [host, nvme], encrypt: required}}
audit: {on_outage: {decisions: deny, lifecycle: spill, own_hits: aggregate}}
"""


class Transfers:
    """What transfers take of the calling thread, from now on."""

    def __init__(self) -> None:
        self.cpu_ns = self.made = 0
        for name in ("store", "load"):
            setattr(SealedTier, name, self._timed(getattr(SealedTier, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began_ns = time.thread_time_ns()
            try:
                return call(*arguments)
            finally:
                self.cpu_ns += time.thread_time_ns() - began_ns
                self.made += 1

        return timed


class Engine:
    """One worker, and an engine's requests to it."""

    def __init__(self, folder: Path, **tiers: Any) -> None:
        (folder / "policy.yaml").write_text(POLICY)
        settings = Settings(
            policy_path=folder / "policy.yaml",
            database_url=f"sqlite:///{folder / 'ledger.db'}",
            spill_path=folder / "spill",
            root_key_path=folder / "root.key",
            keyring_path=folder / "keys.json",
            shred_keys_path=folder / "shred.keys",
            tier_timeout_ms=5000,
            **tiers,
        )
        size = TensorMemory.allocate(1, SPEC).bytes_per_block
        plan = MemoryPlan(lambda blocks: TensorMemory.allocate(blocks, SPEC), BLOCKS, 1, size)
        self.worker: Worker = open_worker(settings, plan)
        if self.worker.governor.offload is not None:
            self.worker.governor.offload.transfers.cost = DeclaredRate(1_000)  # nothing is computed here
        drawn = np.random.default_rng(1)
        self.prompts = [drawn.integers(0, 30_000, 64 * TOKENS).tolist() for _ in range(24)]
        self.who = identify(issuer="idp", tenant="acme", verified={})
        self.number = 0

    def serve(self, transfers: Transfers) -> dict[str, float]:
        """So many requests; nanoseconds a request of this thread, of the transfers in them, and of the clock."""
        governor = self.worker.governor
        transfers.cpu_ns = transfers.made = 0
        began_ns, began_wall_ns = time.thread_time_ns(), time.perf_counter_ns()
        for _ in range(REQUESTS):
            tokens = self.prompts[self.number % len(self.prompts)]
            self.number += 1
            admitted = governor.admit(self.who, MODEL, tokens)
            assert isinstance(admitted, Admission)
            governor.commit([admitted.request_id], [len(tokens)])
            for token in range(DECODED):
                governor.extend_many([admitted.request_id], [token])
            governor.release(admitted.request_id)
            governor.step()
        took_ns, wall_ns = time.thread_time_ns() - began_ns, time.perf_counter_ns() - began_wall_ns
        return {
            "all": took_ns / REQUESTS,
            "control": (took_ns - transfers.cpu_ns) / REQUESTS,
            "wall": wall_ns / REQUESTS,
            "transfers": transfers.made / REQUESTS,
        }


def profile(transfers: Transfers, shown: int = 40) -> int:
    """Print the functions of which the difference is largest."""
    took: list[dict[str, tuple[float, float]]] = []
    with tempfile.TemporaryDirectory() as root:
        for name, tiers in {"without": {}, "host": {"host_tier_bytes": 64 << 20}}.items():
            (Path(root) / name).mkdir()
            engine = Engine(Path(root) / name, **tiers)
            engine.serve(transfers)
            profiler = cProfile.Profile()
            profiler.runcall(engine.serve, transfers)
            engine.worker.close()
            stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
            took.append(
                {
                    f"{Path(file).name}:{line} {function}": (calls / REQUESTS, cumulative * 1e6 / REQUESTS)
                    for (file, line, function), (_, calls, _, cumulative, _) in stats.items()
                }
            )
    without, host = took
    more = {name: each[1] - without.get(name, (0.0, 0.0))[1] for name, each in host.items()}
    for name in sorted(more, key=lambda name: -more[name])[:shown]:
        calls, before = host[name][0], without.get(name, (0.0, 0.0))[0]
        print(f"{more[name]:8.0f} us more  {before:7.1f} -> {calls:7.1f} calls  {name}")
    return 0


def main() -> int:
    bench = Bench(__doc__, "torch", rounds=7, strict=True)
    bench.add("--profile", action="store_true", help="show where the difference goes, and measure nothing")
    options = bench.parse()
    torch.set_num_threads(1)
    transfers = Transfers()
    if options.profile:
        return profile(transfers)
    with tempfile.TemporaryDirectory() as root:
        sides = {}
        for name, tiers in {
            "without": {},
            "host": {"host_tier_bytes": 64 << 20},
            "nvme": {"nvme_tier_path": Path(root) / "tier", "nvme_tier_bytes": 64 << 20},
        }.items():
            (Path(root) / name).mkdir()
            sides[name] = Engine(Path(root) / name, **tiers)
        runs = {name: lambda side=side: side.serve(transfers) for name, side in sides.items()}  # type: ignore[misc]
        with frozen():
            results = alternate(runs, options.rounds, warm=1)
        for side in sides.values():
            side.worker.close()
    figures: dict[str, Any] = {}
    for name in ("host", "nvme"):
        pairs = list(zip(results[name], results["without"], strict=True))
        figures[name] = {
            what: median(with_[what] / without[what] for with_, without in pairs) for what in ("control", "all", "wall")
        } | {"transfers_a_request": median(one["transfers"] for one in results[name])}
        shown = "  ".join(f"{what} {value:.3f}" for what, value in figures[name].items())
        print(f"{name}: with ÷ without: {shown}")
    without_us = median(one["all"] for one in results["without"]) / 1e3
    print(f"without tiers: {without_us:.0f} us a request of this thread")
    bench.keep({"goal": GOAL, "without_us": without_us, **figures})
    return bench.status(all(one["control"] <= GOAL for one in figures.values() if isinstance(one, dict)))


if __name__ == "__main__":
    sys.exit(main())
