"""A vLLM engine of three processes (this one, EngineCore, worker), driven step by step.

L1 Plain and governed engines differ by their connector and its settings, and by nothing else.
L2 The environment of an engine is set while its processes start, and put back afterwards.
"""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from standins.engines.vllm.deployment import CONNECTOR, Deployment
from standins.engines.vllm.engine_site import PROBE

BLOCK = 32
BLOCKS = 64
_ENGINE = {
    "enforce_eager": True,
    "dtype": "bfloat16",
    "max_model_len": 512,
    "block_size": BLOCK,
    "num_gpu_blocks_override": BLOCKS,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "seed": 0,
}
_ON_A_DEVICE = {
    "gpu_memory_utilization": 0.15,
    "kv_cache_memory_bytes": 1 << 28,
}  # others have their part of it


class Answer(NamedTuple):
    """A finished request."""

    tokens: list[int]
    cached_tokens: int
    reason: str | None


class LocalEngine:
    """`vllm.LLM` over the tiny model. With a `deployment` it is governed."""

    def __init__(
        self, model: Path, site: Sequence[str], *, deployment: Deployment | None = None, **options: Any
    ) -> None:
        self.deployment = deployment
        settings = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_PLUGINS": "probe" if deployment is None else "probe,kvcustody",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join([*site, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        }
        options = {**_ENGINE, **_shares(), "worker_extension_cls": f"{PROBE}.WorkerProbe", **options}
        if deployment is not None:
            settings |= deployment.environment()
        _load_plugins()
        with environment(settings):
            from vllm import LLM
            from vllm.config import KVTransferConfig

            if deployment is not None:
                options.setdefault("kv_transfer_config", KVTransferConfig(**CONNECTOR))
            self.llm = LLM(str(model), **options)
        self.engine = self.llm.llm_engine
        self._numbers = itertools.count()
        self.transfer_params: dict[str, dict[str, Any] | None] = {}  # of answers, by request
        self.worker_pid = self.rpc("watch_writes")[0]
        self.core_pid = self.probe("pool")["pid"]

    # -- requests ---------------------------------------------------------------------------------------------

    def submit(
        self,
        tokens: Sequence[int],
        *,
        tenant: str | None = None,
        subject: str | None = "s",
        salt: str | None = None,
        transfer: str | None = None,
        latency: str | None = None,
        max_tokens: int = 4,
        request_id: str | None = None,
        carried_on: dict[str, Any] | None = None,
        **sampling: Any,
    ) -> str:
        """Queue a request; `tenant` gets a fresh token in a governed engine, and is the salt in a plain one."""
        from vllm import SamplingParams

        if tenant is not None and self.deployment is None:
            salt = f"{tenant}-{subject}"
        elif tenant is not None:
            assert self.deployment is not None
            carried = self.deployment.carried(tenant, subject)
            salt, transfer = carried["cache_salt"], carried["transfer"]
        carried_on = {"kvcustody": transfer, "kvcustody_latency": latency, **(carried_on or {})}
        carried_on = {field: given for field, given in carried_on.items() if given is not None}
        extra = {"kv_transfer_params": carried_on} if carried_on else None
        prompt: dict[str, Any] = {"prompt_token_ids": list(tokens)}
        if salt is not None:
            prompt["cache_salt"] = salt
        request_id = request_id or f"r{next(self._numbers)}"
        parameters = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, extra_args=extra, **sampling)
        self.engine.add_request(request_id, prompt, parameters)
        return request_id

    def finish(self, *, steps_max: int = 10_000) -> dict[str, Answer]:
        """Step until nothing is left; answers by request id."""
        answers: dict[str, Answer] = {}
        for _ in range(steps_max):
            if not self.engine.has_unfinished_requests():
                return answers
            answers |= self.step()
        raise AssertionError(f"{steps_max} steps and the engine has not finished")

    def step(self) -> dict[str, Answer]:
        """One message of the EngineCore; answers that it finished."""
        done = {}
        for output in self.engine.step():
            if output.finished:
                completion = output.outputs[0]
                self.transfer_params[output.request_id] = output.kv_transfer_params
                done[output.request_id] = Answer(
                    list(completion.token_ids), output.num_cached_tokens or 0, completion.finish_reason
                )
        return done

    def ask(self, tokens: Sequence[int], **named: Any) -> Answer:
        """One request, start to end."""
        request_id = self.submit(tokens, **named)
        return self.finish()[request_id]

    def abort(self, *request_ids: str) -> None:
        """End requests as a client that goes away does."""
        self.engine.abort_request(list(request_ids))

    # -- eyes -------------------------------------------------------------------------------------------------

    def probe(self, name: str, *arguments: Any) -> Any:
        """Ask the EngineCore (engine_probe)."""
        return self.engine.engine_core.call_utility("probe", name, *arguments)

    def governance(self, name: str, *arguments: Any) -> Any:
        """An administrative call of the governed EngineCore: `erase`, `scan`, `check`, `stats`, `activate`."""
        return self.engine.engine_core.call_utility(f"kvcustody_{name}", *arguments)

    def rpc(self, name: str, *arguments: Any) -> list[Any]:
        """Ask every worker (engine_probe.WorkerProbe)."""
        return self.llm.collective_rpc(name, args=arguments)

    def residue(self) -> list[int]:
        """Bytes that are not zero in each block, over all workers."""
        return [sum(shards) for shards in zip(*self.rpc("block_residue"), strict=True)]

    def free_residue(self) -> int:
        """Bytes that are not zero in blocks that nobody uses and no index names."""
        pool = self.probe("pool")
        return sum(
            count
            for block, count in enumerate(self.residue())
            if block != pool["null"] and not pool["refs"][block] and not pool["indexed"][block]
        )

    def write_report(self) -> dict[str, int]:
        """What lay in blocks when they were handed out, since the last report, over all workers."""
        reports = self.rpc("write_report")
        return {name: sum(report[name] for report in reports) for name in reports[0]}

    def close(self) -> None:
        """End the engine's processes."""
        engine = getattr(self, "engine", None)
        if engine is not None:
            engine.engine_core.shutdown()
        self.engine = self.llm = None  # type: ignore[assignment]
        gc.collect()


def _shares() -> dict[str, Any]:
    """What an engine takes of a device; of a host, `VLLM_CPU_KVCACHE_SPACE` says it."""
    from vllm.platforms import current_platform

    return {} if current_platform.is_cpu() else _ON_A_DEVICE


def _load_plugins() -> None:
    """Every plugin in this process, where vLLM loads them once; an engine's own processes load those that it names."""
    with environment({"VLLM_PLUGINS": "probe,kvcustody"}):
        from vllm.plugins import load_general_plugins

        load_general_plugins()


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """These variables while the block runs (L2)."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
