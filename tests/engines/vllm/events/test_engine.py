"""A whole vLLM engine that nobody governs, seen through its own events: what observe-only gives and what it cannot."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from standins.integrations.observed_totals import observed_totals

pytest.importorskip("zmq")

from kvcustody.audit.evidence.coverage.summary import coverage
from kvcustody.audit.store.database.engine import open_store
from kvcustody.integrations.events.observer import EngineObserver, WatchOptions, open_observer
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from standins.engines.vllm.local_engine import BLOCK, LocalEngine

POLICY = b"""
schema: kvcustody/policy@1
name: brief
profile: shared
classifications: [internal, restricted]
classify: [{tenant: acme, as: internal}]
tenants: {acme: {quota: {guaranteed: 20%, cap: 60%}}}
rules: [{id: own, effect: permit, action: [reuse, export], when: {reader: owner}}]
retention:
  internal:   {idle: 2s, absolute: 2s, active_max: 1s}
  restricted: {idle: 1h, absolute: 1h, active_max: 1s}
scrub: {default: {within: 1s, verify: all}}
offload: {internal: never, restricted: never}
audit: {on_outage: {decisions: deny, lifecycle: spill, own_hits: aggregate}}
"""
VICTIM = list(range(100, 100 + 3 * BLOCK))
OTHER = list(range(300, 300 + 2 * BLOCK))


@pytest.fixture(scope="module")
def addresses() -> Iterator[list[str]]:
    with tempfile.TemporaryDirectory(prefix="kv") as folder:  # short: a socket's path has 107 bytes
        yield [f"ipc://{folder}/events", f"ipc://{folder}/replay"]


@pytest.fixture(scope="module")
def engine(model: Path, site: list[str], addresses: list[str]) -> Iterator[LocalEngine]:
    from vllm.config import KVEventsConfig

    events = KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint=addresses[0], replay_endpoint=addresses[1]
    )
    made = LocalEngine(model, site, kv_events_config=events)
    yield made
    made.close()


def step_until(observer: EngineObserver, condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until, observer.status()
        observer.step(50)


def test_a_whole_engine_is_observed_and_nothing_in_it_is_enforced(
    engine: LocalEngine, addresses: list[str], tmp_path: Path
) -> None:
    table = compile_policy(load_policy(POLICY, name="brief.yaml"), revision=1)
    watch = WatchOptions(
        addresses[0],
        table,
        replay_endpoint=addresses[1],
        tenants_by_salt={"acme-s": "acme"},
        ledger=str(tmp_path / "ledger.db"),
        spill=tmp_path / "spill",
    )
    engine.ask([*OTHER, 7])  # before anybody watched: it comes by replay
    with open_observer(watch) as observer:
        stats = observer.engine.stats
        engine.ask([*VICTIM, 7], tenant="acme")
        step_until(observer, lambda: stats().blocks == 5)
        assert {share.tenant: share.blocks for share in observer.engine.shares()} == {"acme": 3, None: 2}
        assert sum(engine.probe("pool")["indexed"]) == 5, "the engine's own index agrees"
        step_until(observer, lambda: stats().overdue_blocks == 3)
        assert engine.ask([*VICTIM, 7], tenant="acme").cached_tokens == 3 * BLOCK, "overdue, and still served"
        assert engine.llm.reset_prefix_cache()
        engine.ask([5] * BLOCK)  # vLLM sends what happened at its next step
        step_until(observer, lambda: stats().overdue_blocks == 0 and stats().blocks <= 1)
        assert not stats().unsure and not stats().malformed
    store = open_store(watch.ledger or "")
    with store.connect() as connection:
        rows = {row.tenant: row for row in observed_totals(connection)}
        assert rows["acme"].overdue_blocks == 3 and rows["acme"].removed_late_blocks == 3
        assert rows["acme"].gaps == 0
        assert coverage(connection).rows == (), "observed, never covered"
    store.dispose()
