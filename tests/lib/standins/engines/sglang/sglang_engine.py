"""An SGLang engine of three processes (this one, scheduler, detokenizer) over the tiny model.

L1 Plain and governed engines differ by `radix_cache_backend` and by settings, and by nothing else.
L2 The environment of an engine is set while its processes start, and put back afterwards.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from standins.engines.vllm.deployment import Deployment

SLOTS = 4096
CPU_SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "SGLANG_CPU_OMP_THREADS_BIND": "all",
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
}
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "dtype": "float32",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "skip_server_warmup": True,
    "mem_fraction_static": 0.05,
    "max_total_tokens": SLOTS,
    "context_length": 1024,
    "page_size": 1,
    "log_level": "error",
    "watchdog_timeout": 120,
}
SCORES = ("input_token_logprobs", "input_top_logprobs", "output_token_logprobs", "output_top_logprobs")


class Answer(NamedTuple):
    """A finished request. `scores`: its log-likelihoods as SGLang says them, of one that asked (`return_logprob`)."""

    tokens: list[int]
    cached_tokens: int
    reason: Any
    scores: dict[str, list[Any]] | None = None


@contextmanager
def environment(settings: dict[str, str]):
    """These variables while the block runs."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class SglangEngine:
    """`sglang.Engine`. With a `deployment` it is governed."""

    def __init__(
        self,
        model: Path,
        site: Sequence[str],
        *,
        deployment: Deployment | None = None,
        settings: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        self.deployment = deployment
        every = dict(CPU_SETTINGS)
        every["PYTHONPATH"] = os.pathsep.join([*site, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        if deployment is not None:
            every |= deployment.environment()
            options.setdefault("radix_cache_backend", "kvcustody")
        with environment(every | (settings or {})):
            import sglang

            self.engine = sglang.Engine(model_path=str(model), **{**OPTIONS, **options})
        self._answers = Path(tempfile.mkdtemp(prefix="probe"))
        self._number = 0

    def probe(self, name: str, **given: Any) -> Any:
        """What the scheduler's process says (`sglang_probe`)."""
        self._number += 1
        answer = self._answers / str(self._number)
        self.engine.collective_rpc("probe", name=name, answer=str(answer), given=given)
        return json.loads(answer.read_text())

    def run(self, tokens: Sequence[int], token: str | None = None, count: int = 8, **named: Any) -> Answer:
        """One request alone."""
        return self.run_all([(tokens, token)], count, **named)[0]

    def run_all(
        self, requests: Sequence[tuple[Sequence[int], str | None]], count: int = 8, **named: Any
    ) -> list[Answer]:
        """Requests at once, each with its scope token."""

        async def every() -> list[Any]:
            return await asyncio.gather(*(self._one(list(tokens), token, count, named) for tokens, token in requests))

        return self.engine.loop.run_until_complete(every())

    async def _one(self, tokens: list[int], token: str | None, count: int, named: dict[str, Any]) -> Answer:
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        from fastapi import HTTPException
        from sglang.srt.managers.io_struct import GenerateReqInput

        asked = GenerateReqInput(input_ids=tokens, sampling_params=sampling, cache_salt=token, **named)
        try:
            said = await anext(self.engine.tokenizer_manager.generate_request(asked, None))
        except (ValueError, HTTPException) as refused:
            return Answer([], 0, {"type": "abort", "message": str(refused)})
        meta = said["meta_info"]
        scores = {name: meta[name] for name in SCORES if name in meta}
        return Answer(list(said["output_ids"]), meta["cached_tokens"], meta["finish_reason"], scores)

    def stop(self, seconds: float = 30.0) -> None:
        """End the scheduler as a server that is asked to stop does: it gives everything back and exits."""
        from sglang.srt.managers.io_struct import ShutdownReq

        pid = self.probe("pid")
        manager = self.engine.tokenizer_manager
        if manager._subprocess_watchdog is not None:
            manager._subprocess_watchdog.stop()
        manager._dispatch_to_scheduler(ShutdownReq())
        wait_for_death(pid, seconds)

    def kill(self) -> None:
        """kill -9 of the scheduler."""
        pid = self.probe("pid")
        manager = self.engine.tokenizer_manager
        if manager._subprocess_watchdog is not None:
            manager._subprocess_watchdog.stop()
        os.kill(pid, signal.SIGKILL)
        wait_for_death(pid, 20.0)

    def close(self) -> None:
        """End its processes as SGLang does, which kills every child of this process: one engine at a time."""
        self.engine.shutdown()


def wait_for_death(pid: int, seconds: float) -> None:
    """Until a child has ended; raises `TimeoutError` where it does not."""
    import psutil

    until = time.monotonic() + seconds
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > until:
            raise TimeoutError(f"process {pid} still runs")
        time.sleep(0.1)
