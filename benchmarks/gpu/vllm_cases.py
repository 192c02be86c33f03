"""One vLLM engine in a process of its own, plain or governed, and what it did.

    python -m gpu.vllm_cases CASE plain|governed OUT

The engines, deployments, models, probes and workloads are those of `tests/engines/vllm`; a case is a model and options.
Both engines of a case do the same: one request after the other of two tenants, whose answers are compared (in a batch,
when a request arrives decides how its sums are rounded, in plain vLLM too); then requests that come, go and are
aborted; then answers that outgrow the pool. `Found` is what came of it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from harness.hardware import REPOSITORY

PLAIN, GOVERNED = "plain", "governed"
STANDINS = REPOSITORY / "tests" / "lib"
GRAPHS = {"enforce_eager": False}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
SETTLED_SECONDS = 8.0


class Case(NamedTuple):
    """A model of `tiny_model`, vLLM's options and environment, and why a host cannot run it, where it cannot."""

    model: str = "full"
    options: Mapping[str, Any] = MappingProxyType({})
    environment: Mapping[str, str] = MappingProxyType({})
    device_only: str = ""
    like: str = ""  # another case, whose plain engine is this one's too: the options change no answer
    refused: str = ""  # governance refuses it in these words


V1, V2 = ({"VLLM_USE_V2_MODEL_RUNNER": number} for number in "01")
NO_GRAPHS = "the host records no graphs"
NO_V2 = "the V2 runner needs Triton's driver"
NO_STATES = "the host's Mamba kernels keep no states for later requests"
ONE_LAYOUT = "the host's attention reads LBHNC alone, in every case here"
UNCACHED = {"enable_prefix_caching": False, "num_gpu_blocks_override": 32}
BASE = "V1, eager"  # plain vLLM itself: where this does not start, nothing is shown
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")

CASES = {
    BASE: Case(environment=V1),
    "V2, eager": Case(environment=V2, device_only=NO_V2),
    "V1, graphs": Case(options=GRAPHS, environment=V1, device_only=NO_GRAPHS),
    "V2, graphs": Case(options=GRAPHS, environment=V2, device_only=NO_V2),
    "hybrid": Case(model="hybrid", environment=V1, device_only=NO_STATES),
    "hybrid, graphs": Case(model="hybrid", options=GRAPHS, environment=V1, device_only=NO_GRAPHS),
    "hybrid, prefix caching off": Case(model="hybrid", options=UNCACHED, environment=V1),
    "MLA": Case(model="mla", options={"block_size": 64}, environment=V1),
    "fp8 KV cache": Case(options={"kv_cache_dtype": "fp8"}, environment=V1),
    "sliding window": Case(model="windowed", environment=V1),
    "sliding window, V2, graphs": Case(model="windowed", options=GRAPHS, environment=V2, device_only=NO_V2),
    "n-gram speculation": Case(options={"speculative_config": NGRAM}, environment=V1),
    **{
        f"layout {name}": Case(environment=V1 | {"VLLM_KV_CACHE_LAYOUT": name}, device_only=ONE_LAYOUT, like=BASE)
        for name in LAYOUTS
    },
}
REFUSED = {
    "vLLM's own KV events": Case(
        options={"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}},
        environment=V1,
        refused="carry prompt token ids",
    ),
    "another connector": Case(
        options={"kv_transfer_config": ["KVCustody", "ExampleConnector"]},
        environment=V1,
        refused="keeps KV blocks outside this engine",
    ),
    "Mamba states aligned by the V2 runner": Case(
        model="hybrid",
        options={"enable_prefix_caching": True, "mamba_cache_mode": "align"},
        environment=V2,
        device_only=NO_V2,
        refused="moves recurrent state into new blocks",
    ),
    "sleep mode": Case(
        options={"enable_sleep_mode": True},
        environment=V1,
        device_only="the host's vLLM has none",
        refused="sleep mode gives the cache's memory away",
    ),
}


class Found(NamedTuple):
    """What an engine did: every answer that both are asked for, what was cached, and what its memory held."""

    answers: list[list[int]]
    own_cached: int  # prompt tokens that a tenant found of its own
    foreign_cached: int  # that another one found
    churned: dict[str, int]  # `workload.churn`
    preempted: int
    handed: dict[str, int]  # `WorkerProbe.write_report`
    left_bytes: int  # in free blocks, after the deadline of a scrub
    disagreements: list[str]  # of governance's books and the engine's
    refused: str = ""  # why the engine did not start; nothing else is told then


def work(engine: Any) -> Found:
    """The same for both engines."""
    from standins.engines.vllm.workload import churn, outgrow

    engine.write_report()
    answers, own, foreign = [], 0, 0
    for number in range(3):
        prompt = [at % 24 + 20 + 40 * number for at in range(100 + 200 * (number == 2))]  # says the same again
        for tenant in ("alpha", "alpha", "beta"):
            answer = engine.ask(prompt, tenant=tenant, max_tokens=16)
            answers.append(answer.tokens)
            if tenant == "beta":
                foreign += answer.cached_tokens
            else:
                own += answer.cached_tokens
    churned = churn(engine, seed=6, requests=20)
    preempted = outgrow(engine)
    handed = engine.write_report()
    until = time.monotonic() + (SETTLED_SECONDS if engine.deployment is not None else 0)
    while (left := engine.free_residue()) and time.monotonic() < until:
        time.sleep(0.2)
    books = [] if engine.deployment is None else engine.governance("check") + engine.governance("scan")
    return Found(answers, own, foreign, churned, preempted, handed, left, [str(one) for one in books])


def main(name: str, kind: str, out: str) -> int:
    """Start the engine, let it work, and leave what was found in a file."""
    sys.path.insert(0, str(STANDINS))
    case = (CASES | REFUSED)[name]
    os.environ.update(case.environment)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from standins.engines.vllm.deployment import Deployment
    from standins.engines.vllm.engine_site import enter_site, make_site
    from standins.engines.vllm.local_engine import LocalEngine
    from standins.engines.vllm.tiny_model import save_model

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        site = make_site(folder / "site")
        enter_site(site)
        deployment = Deployment(folder / "deployment") if kind == GOVERNED else None
        model = save_model(folder / "model", kind=case.model)
        try:
            engine = LocalEngine(model, site, deployment=deployment, **_configured(case.options))
        except Exception as error:
            found = Found([], 0, 0, {}, 0, {}, 0, [], refused=f"{type(error).__name__}: {str(error)[:300]}")
        else:
            found = work(engine)
            engine.close()
        Path(out).write_text(json.dumps(found._asdict()))
    return 0


def _configured(options: Mapping[str, Any]) -> dict[str, Any]:
    """With vLLM's own classes where it takes nothing else."""
    from vllm.config import KVEventsConfig, KVTransferConfig

    configured = dict(options)
    if "kv_events_config" in configured:
        configured["kv_events_config"] = KVEventsConfig(**configured["kv_events_config"])
    if "kv_transfer_config" in configured:
        each = [{"kv_connector": one, "kv_role": "kv_both"} for one in configured["kv_transfer_config"]]
        configured["kv_transfer_config"] = KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"connectors": each},
        )
    return configured


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
