"""What custody costs under continuous batching: transformers governed against transformers plain, step for step.

1. Both engines run in one process on one model, and take turns prompt set by prompt set; the order turns too. Page
   size, pool, budgets, safety margin and seed are the same; torch has one thread unless it is told otherwise.
2. Each pair must produce the same tokens in the same number of steps, or the run fails: nothing else is compared.
3. The governed engine has a real worker: keys, policy, quotas, scrub, and a ledger in SQLite. What a round handed to
   the ledger is durable before the next engine's turn, so nothing of governance runs in the plain engine's time. That
   wait is between the turns, as the writer works beside the engine; its CPU time counts in the process's.
4. Control path: CPU time of the calling thread in scheduling and updating, without the forward. Tokens per second:
   wall time of everything. There is no timer: the loop itself looks at the clock at every step.
5. `fresh`: no prompt is seen twice and the pool is full, so every block handed out was evicted and scrubbed.
   `shared`: half of every prompt is its tenant's system prompt, and the pool is roomy. `decode`: few
   tokens in, many out.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from time import perf_counter_ns, process_time_ns, thread_time_ns
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from kvcustody.governance.identity.model_identity import ModelIdentity
from kvcustody.governance.identity.principal import identify
from kvcustody.governance.settings import Settings
from kvcustody.integrations.transformers.batching.governed_batching import GovernedBatching
from kvcustody.testkit.tiny_model import tiny_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from bench import Bench
from spread import ratio, spread

GOAL = 0.99
MARGIN = 0.5  # so that the plain engine evicts in time, where it would otherwise wait
WARM = 2  # pairs before the clock counts
ANSWER_SECONDS = 120  # of an engine's own loop
TENANTS = ("a", "b")
POLICY = """\
schema: kvcustody/policy@1
name: cost
profile: shared
scope: tenant
classifications: [low]
classify:
  - {tenant: "*", as: low}
tenants:
  a: {quota: {guaranteed: 25%, cap: 100%, borrow: true}}
  b: {quota: {guaranteed: 25%, cap: 100%, borrow: true}}
rules:
  - {id: own, effect: permit, action: reuse, when: {reader: owner}}
retention:
  low: {idle: 30m, absolute: 8h, active_max: 2h}
scrub:
  default: {within: 1s, verify: 1/64}
offload: {low: never}
audit: {on_outage: {decisions: deny, lifecycle: spill, own_hits: aggregate}}
eviction: {policy: lru}
"""


class Shape(NamedTuple):
    """A model and how much work one round is."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    dtype: torch.dtype
    requests: int
    scale: int  # multiplies prompt and answer lengths


SHAPES = {
    "tiny": Shape(64, 2, 4, 2, 128, 256, torch.float32, 8, 1),
    "small": Shape(384, 4, 6, 2, 1024, 2048, torch.float32, 8, 1),
    "llama-1b": Shape(2048, 16, 32, 8, 8192, 128256, torch.bfloat16, 32, 1),
    "llama-8b": Shape(4096, 32, 32, 8, 14336, 128256, torch.bfloat16, 32, 4),
}


class Workload(NamedTuple):
    """One round's prompts: tokens of each, of which shared, tokens to generate, and pool size in rounds' worth."""

    prompt: int
    shared: int
    new: int
    pool_rounds: float


WORKLOADS = {
    "fresh": Workload(192, 0, 16, 2.3),
    "shared": Workload(192, 96, 16, 40.0),
    "decode": Workload(32, 0, 64, 4.0),
}


class Engine:
    """One manager, driven on the calling thread: what its own loop does, with the clock running.

    served: the loop is the engine's own, on a thread of its own, which alone knows how to keep a step in flight; the
    control path is not timed then.
    """

    def __init__(
        self,
        manager: Any,
        add: Callable[[int, list[int]], str | None],
        settle: Callable[[], object] = lambda: None,
        *,
        served: bool = False,
    ) -> None:
        self._served = served
        if served:
            manager.start()
        elif manager.batch_processor is None:
            manager.batch_processor = manager._create_batch_processor()
        self._manager = manager
        self._add = add
        self._settle = settle  # what the engine has put off is done
        self.control_ns: list[int] = []
        self.wall_ns: list[int] = []
        self.process_ns: list[int] = []

    def round(self, prompts: list[list[int]], counting: bool) -> tuple[list[list[int]], list[int]]:
        """All prompts to their end; returns the tokens by prompt, and the control path's CPU time by step."""
        started, process = perf_counter_ns(), process_time_ns()
        names = [self._add(at, tokens) for at, tokens in enumerate(prompts)]
        steps: list[int] = []
        if self._served:
            finished = [self._manager.get_result(timeout=ANSWER_SECONDS) for _ in names]
        else:
            steps = self._driven()
            queue = self._manager.output_router.output_queue
            finished = [queue.get() for _ in range(queue.qsize())]
        wall = perf_counter_ns() - started
        self._settle()
        process = process_time_ns() - process
        if None in finished:
            raise RuntimeError(f"no answer within {ANSWER_SECONDS} s")
        results = {result.request_id: result for result in finished}
        for result in results.values():
            if result.error is not None:
                raise RuntimeError(f"a request failed: {result.error}")
        if counting:
            self.control_ns += steps
            self.wall_ns.append(wall)
            self.process_ns.append(process)
        return [list(results[name].generated_tokens) for name in names], steps

    def _driven(self) -> list[int]:
        """Steps until nothing is left; the control path's CPU time of each."""
        processor = self._manager.batch_processor
        steps: list[int] = []
        while True:
            clock = thread_time_ns()
            ready = processor.prepare_next_batch()
            prepared = thread_time_ns() - clock
            if not ready:
                return steps
            processor._generation_step(self._manager.model)
            clock = thread_time_ns()
            processor.update_batch()
            steps.append(prepared + thread_time_ns() - clock)

    def close(self) -> None:
        """End a loop that was started."""
        if self._served:
            self._manager.stop(block=True)


def build_model(shape: Shape, device: str) -> Any:
    """A random-weight Llama of this shape, made on its device."""
    torch.manual_seed(0)
    config: Any = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=8192,
    )
    config._attn_implementation = "sdpa"
    torch.set_default_dtype(shape.dtype)
    with torch.device(device):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def identity(shape: Shape, page: int) -> ModelIdentity:
    """What conditions this model's keys and values."""
    return tiny_model(
        weights_digest="sha256:random",
        tokenizer_digest="none",
        chat_template="none",
        kv_dtype=str(shape.dtype),
        kv_layout="paged",
        block_tokens=page,
        attention={"heads": shape.heads, "kv_heads": shape.kv_heads},
    )


def settings(folder: Path, page: int) -> Settings:
    """A worker on its own folder."""
    (folder / "policy.yaml").write_text(POLICY, encoding="utf-8")
    return Settings(
        policy_path=folder / "policy.yaml",
        database_url=f"sqlite:///{folder / 'ledger.db'}",
        spill_path=folder / "spill",
        root_key_path=folder / "root.key",
        keyring_path=folder / "keys.json",
        block_tokens=page,
    )


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Pairs of rounds of one workload."""
    shape, load = SHAPES[options.shape], WORKLOADS[name]
    prompt, shared, new = (length * shape.scale for length in (load.prompt, load.shared, load.new))
    blocks_a_request = -(-(prompt + new) // options.page)
    blocks = int(load.pool_rounds * shape.requests * blocks_a_request) + 8
    model = build_model(shape, options.device)
    random = np.random.default_rng(options.seed)
    systems = [random.integers(1, shape.vocabulary, shared).tolist() for _ in TENANTS]
    people = [identify(issuer="idp", tenant=tenant, verified={"subject": "s"}) for tenant in TENANTS]
    generation = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1)

    def config() -> ContinuousBatchingConfig:
        return ContinuousBatchingConfig(
            page_size=options.page,
            num_blocks=blocks,
            max_batch_tokens=options.batch_tokens,
            max_requests_per_batch=shape.requests,
            max_memory_percent=0.95,
            use_async_batching=options.asynchronous,
            use_cuda_graph=options.graphs,
            safety_margin=MARGIN,
            seed=0,
        )

    plain_manager = ContinuousBatchingManager(
        model=model, generation_config=generation, continuous_batching_config=config()
    )
    served = options.served or options.asynchronous
    plain = Engine(plain_manager, lambda _, tokens: plain_manager.add_request(tokens), served=served)
    with (
        closing(plain),
        tempfile.TemporaryDirectory() as folder,
        GovernedBatching(
            model,
            settings(Path(folder), options.page),
            identity(shape, options.page),
            generation_config=generation,
            batching_config=config(),
            tick_seconds=None,
        ) as batching,
    ):
        worker = batching.worker
        assert worker is not None
        governed = Engine(
            batching.manager,
            lambda at, tokens: batching.submit(people[at % len(TENANTS)], tokens),
            worker.writer.flush,
            served=served,
        )
        gc.collect()
        gc.freeze()
        unlike_itself = 0
        for turn in range(WARM + options.pairs):
            prompts = [
                systems[at % len(TENANTS)] + random.integers(1, shape.vocabulary, prompt - shared).tolist()
                for at in range(shape.requests)
            ]
            engines = (plain, governed) if turn % 2 else (governed, plain)
            first, second = (engine.round(prompts, turn >= WARM) for engine in engines)
            if first[0] == second[0] and len(first[1]) == len(second[1]):
                continue
            by_plain = (first if turn % 2 else second)[0]
            if not served or plain.round(prompts, False)[0] == by_plain:
                raise RuntimeError(f"{name}: the engines differ in tokens or steps ({len(first[1])}, {len(second[1])})")
            unlike_itself += 1  # its loop joins what has arrived: other batches round otherwise
        governed.close()
        stats = batching.custody.governor.stats()
        gc.unfreeze()
    found = record((prompt, shared, new, blocks, shape.requests), plain, governed, stats)
    return found | {"rounds_in_which_plain_differs_from_itself": unlike_itself}


def record(sizes: tuple[int, ...], plain: Engine, governed: Engine, stats: Any) -> dict[str, Any]:
    """The figures of one workload."""
    prompt, shared, new, blocks, requests = sizes
    tokens = requests * new
    speed = ratio(plain.wall_ns, governed.wall_ns)  # t plain / t governed = tokens per second governed / plain
    pool = stats.pools[0]
    control = (
        {
            "plain": spread(plain.control_ns)._asdict(),
            "governed": spread(governed.control_ns)._asdict(),
            "total_ratio": round(sum(governed.control_ns) / sum(plain.control_ns), 4),
            "median_ratio": ratio(governed.control_ns, plain.control_ns)._asdict(),
        }
        if plain.control_ns
        else None
    )
    return {
        "prompt_tokens": prompt,
        "shared_tokens": shared,
        "new_tokens": new,
        "requests": requests,
        "pool_blocks": blocks,
        "pairs": len(plain.wall_ns),
        "steps": len(plain.control_ns),
        "cpu_share": {  # of the wall time; with one thread far below 1 where the machine was not quiet
            "plain": round(sum(plain.process_ns) / sum(plain.wall_ns), 3),
            "governed": round(sum(governed.process_ns) / sum(governed.wall_ns), 3),
        },
        "blocks_allocated": pool.allocated,
        "blocks_scrubbed": sum(pool.scrubbed) - blocks,  # less the zeroing at the start
        "hit_blocks": sum(tally.hit_blocks for tally in stats.tenants.values()),
        "control_cpu_per_step": control,  # None where the engines' own loops served
        "process_cpu_ratio": ratio(governed.process_ns, plain.process_ns)._asdict(),
        "tokens_per_second": {
            "plain": round(tokens * 1e9 / float(np.median(plain.wall_ns)), 1),
            "governed": round(tokens * 1e9 / float(np.median(governed.wall_ns)), 1),
            "ratio": speed._asdict(),
            "goal": GOAL,
            "met": speed.value >= GOAL,
        },
    }


def line(name: str, figures: dict[str, Any]) -> str:
    """One row of the table."""
    control, speed = figures["control_cpu_per_step"], figures["tokens_per_second"]
    rate = speed["ratio"]
    cells = (
        name,
        f"{figures['process_cpu_ratio']['value']:.3f}",
        f"{control['plain']['median_us']:.0f}" if control else "-",
        f"{control['governed']['median_us']:.0f}" if control else "-",
        f"{control['total_ratio']:.3f}" if control else "-",
        f"{speed['plain']:.0f}",
        f"{speed['governed']:.0f}",
        f"{rate['value']:.4f} [{rate['low']:.4f}, {rate['high']:.4f}]",
        str(figures["blocks_scrubbed"]),
        "yes" if speed["met"] else "no",
    )
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Measure, print the table, and write the result file where asked."""
    bench = Bench(__doc__, "transformers", "torch", "kvcustody", "numpy", strict=True)
    bench.add("--device", default="cpu")
    bench.add("--shape", choices=SHAPES, default="small")
    bench.add("--workloads", default=",".join(WORKLOADS), help="comma-separated (default: %(default)s)")
    bench.add("--pairs", type=int, default=21)
    bench.add("--page", type=int, default=16, help="tokens in a block (default: %(default)s)")
    bench.add("--batch-tokens", type=int, default=512)
    bench.add("--seed", type=int, default=1)
    bench.add("--threads", type=int, default=1, help="threads of torch on the CPU (default: %(default)s)")
    bench.add("--graphs", action="store_true", help="both engines record and replay CUDA graphs")
    bench.add("--served", action="store_true", help="each engine's own loop, on a thread of its own")
    bench.add("--asynchronous", action="store_true", help="with a step in flight; implies --served")
    options = bench.parse()
    torch.set_num_threads(options.threads)
    workloads: dict[str, Any] = {}
    print(
        "| workload | process CPU | control us/step plain | governed | CPU ratio | tokens/s plain | governed "
        "| ratio [95 %] | scrubbed | goal met |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    for name in options.workloads.split(","):
        workloads[name] = measure(name, options)
        print(line(name, workloads[name]), flush=True)
    settings = {
        "device": options.device,
        "shape": options.shape,
        "block_tokens": options.page,
        "batch_tokens": options.batch_tokens,
        "threads": torch.get_num_threads(),
        "seed": options.seed,
        "graphs": options.graphs,
        "served": options.served or options.asynchronous,
        "asynchronous": options.asynchronous,
    }
    bench.keep({"settings": settings, "workloads": workloads})
    return bench.status(all(one["tokens_per_second"]["met"] for one in workloads.values()))


if __name__ == "__main__":
    sys.exit(main())
