"""Copies of a governed engine in files: after a restart, under tensor parallelism, and what policy and keys end."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable
from os import kill
from pathlib import Path

import orjson
import pytest
from sqlalchemy import select

from kvcustody.audit.evidence.copies.copy_coverage import copy_coverage
from kvcustody.audit.evidence.copies.copy_rows import copy_totals
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.leaf_tables import releases, residencies
from kvcustody.audit.store.schema.ledger import events, incarnations
from kvcustody.clock import SystemClock
from kvcustody.governance.identity.domain_spec import tenant_owner
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.root_key_wrapping import open_wrapping
from kvcustody.governance.keys.wrapped_key_store import FileKeyStore
from standins.engines.vllm.local_engine import BLOCK, LocalEngine, environment
from standins.engines.vllm.tier_engines import (
    OBJECT,
    PREFIX,
    TIER_POLICY,
    deployment_with,
    displace,
    nvme,
    options,
    prompt,
    tier,
)
from standins.waiting import until

Start = Callable[..., LocalEngine]


def files_with(folder: Path, content: bytes) -> tuple[int, int]:
    """How many files of a tier hold these bytes, and how many files there are."""
    files = [path for path in folder.rglob("*") if path.is_file() and len(path.name) == 64]
    return sum(content in path.read_bytes() for path in files), len(files)


def test_own_prompts_come_back_after_a_restart_and_foreign_ones_never(start: Start, plain: LocalEngine, tmp_path: Path):
    folder, mine = tmp_path / "tier", prompt(1)
    deployment = deployment_with(tmp_path / "site")
    there = options(**nvme(folder))
    expected = plain.ask(mine, max_tokens=16).tokens
    engine = start(deployment=deployment, **there)
    assert engine.ask(mine, tenant="alpha", max_tokens=16).tokens == expected
    indexed = engine.probe("pool")["indexed"]
    contents = [engine.rpc("block_content", block)[0] for block, is_there in enumerate(indexed) if is_there]
    displace(engine)
    assert engine.ask(mine, tenant="alpha", max_tokens=16).cached_tokens == PREFIX * BLOCK
    assert tier(engine, "nvme")["restored_blocks"] == PREFIX
    engine.close()
    for content in [one for one in contents if len(set(one)) > 8]:
        holding, files = files_with(folder, content)
        assert files >= PREFIX // 4
        assert holding == 0

    engine = start(deployment=deployment, **there)
    assert engine.ask(mine, tenant="beta", max_tokens=16).cached_tokens == 0
    answer = engine.ask(mine, tenant="alpha", max_tokens=16)
    print(tier(engine, "nvme"))
    assert (answer.cached_tokens, answer.tokens) == (PREFIX * BLOCK, expected)
    engine.governance("erase", "alpha", None, None)
    assert engine.ask(mine, tenant="alpha", max_tokens=16).cached_tokens == 0
    assert engine.governance("check") == []
    engine.close()


def test_every_copy_is_on_record_from_its_beginning_to_the_evidence_of_its_end(start: Start, tmp_path: Path):
    deployment = deployment_with(tmp_path / "site")
    engine = start(deployment=deployment, **options())
    for seed in range(3):
        engine.ask(prompt(20 + seed), tenant="alpha", subject=f"s{seed}")
    displace(engine)
    engine.governance("erase", "alpha", "s1", None)
    assert engine.ask(prompt(21), tenant="alpha", subject="s1").cached_tokens == 0
    steps = tier(engine)["steps"]
    engine.close()
    ledger = open_store(deployment.ledger_url)
    with ledger.connect() as connection:
        (life,) = connection.scalars(select(incarnations.c.id))
        totals = copy_totals(connection, life)["host"]
        (covered,) = copy_coverage(connection).by_tier()
    ledger.dispose()
    print(steps, totals, covered)
    assert totals.stored == totals.ended == totals.destroyed >= steps["stored"] > 3 * PREFIX // OBJECT
    assert steps["ended erased"] == PREFIX // OBJECT
    assert covered.coverage == 1.0
    assert covered.due == totals.stored


def test_a_policy_that_lets_nothing_leave_ends_what_has_left(start: Start, tmp_path: Path):
    mine = prompt(2)
    engine = start(deployment=deployment_with(tmp_path / "site"), **options())
    engine.ask(mine, tenant="alpha")
    displace(engine)
    assert tier(engine)["copies"] > 0
    stricter = TIER_POLICY.replace("internal: {tiers: [host, nvme], encrypt: required}", "internal: never")
    assert stricter != TIER_POLICY
    engine.governance("activate", stricter, 2, "tests")
    assert until(lambda: tier(engine)["copies"] == 0)
    assert tier(engine)["steps"]["ended policy"] > 0
    assert engine.ask(mine, tenant="alpha").cached_tokens == 0
    displace(engine)
    assert tier(engine)["copies"] == 0
    engine.close()


def test_a_key_that_was_destroyed_by_another_process_ends_its_copies(start: Start, plain: LocalEngine, tmp_path: Path):
    mine = prompt(3)
    deployment = deployment_with(tmp_path / "site")
    engine = start(deployment=deployment, **options())
    for tenant in ("alpha", "beta"):
        engine.ask(mine, tenant=tenant)
    displace(engine)
    folder = deployment.folder
    port = open_wrapping("file", folder / "root.key", strict=False)
    keyring = Keyring(FileKeyStore(folder / "keyring.json"), port, SystemClock())
    keyring.destroy(tenant_owner("api-keys", "alpha"), 1)
    keyring.close()
    before = tier(engine)
    expected = plain.ask(mine, max_tokens=12).tokens
    answer = engine.ask(mine, tenant="alpha", max_tokens=12)
    assert (answer.cached_tokens, answer.tokens) == (0, expected)
    assert tier(engine)["restored_blocks"] == before["restored_blocks"]
    assert engine.ask(mine, tenant="beta", max_tokens=12).cached_tokens == PREFIX * BLOCK, "positive control"
    engine.close()


def test_each_of_two_workers_seals_its_own_part(start: Start, plain: LocalEngine, tmp_path: Path):
    mine = prompt(4)
    with environment({"VLLM_CPU_OMP_THREADS_BIND": "0|1"}):
        engine = start(deployment=deployment_with(tmp_path / "site"), tensor_parallel_size=2, **options())
    expected = engine.ask(mine, tenant="alpha", max_tokens=16).tokens
    displace(engine)
    used = [found["used"] for found in engine.rpc("tier_has", "host", b"nothing")]
    assert len(used) == 2
    assert min(used) > 0
    answer = engine.ask(mine, tenant="alpha", max_tokens=16)
    assert (answer.cached_tokens, answer.tokens) == (PREFIX * BLOCK, expected)
    displace(engine)
    engine.rpc("tier_fault", "host", "loads fail", 0.0, 1)
    answer = engine.ask(mine, tenant="alpha", max_tokens=16)
    assert (answer.cached_tokens, answer.tokens) == (0, expected)
    assert tier(engine)["failed_loads"] == 1
    assert engine.ask(mine, tenant="beta", max_tokens=16).cached_tokens == 0
    assert engine.governance("check") == []
    engine.close()


def test_what_a_killed_engine_left_is_found_again_or_ended_by_the_next(
    start: Start, plain: LocalEngine, tmp_path: Path
):
    folder, mine = tmp_path / "tier", prompt(5)
    deployment = deployment_with(tmp_path / "site")
    there = options(nvme_tier_path=str(folder), nvme_tier_bytes=256 << 20)
    expected = plain.ask(mine, max_tokens=16).tokens
    engine = start(deployment=deployment, **there)
    for tenant, seed in (("alpha", 5), ("beta", 6)):  # the policy names alpha alone
        engine.ask(prompt(seed), tenant=tenant, max_tokens=16)
    indexed = engine.probe("pool")["indexed"]
    contents = [engine.rpc("block_content", block)[0] for block, is_there in enumerate(indexed) if is_there]
    displace(engine, rounds=2)
    assert until(lambda: min(tier(engine, name)["copies"] for name in ("host", "nvme")) >= 2 * PREFIX // OBJECT)
    engine.submit(prompt(7), tenant="alpha", max_tokens=300)  # still running when it dies
    for _ in range(10):
        engine.step()
    time.sleep(1.0)  # the ledger's writer has had its turn
    for process in (engine.worker_pid, engine.core_pid):
        kill(process, signal.SIGKILL)
    engine.close()
    for content in [one for one in contents if len(set(one)) > 8]:
        holding, files = files_with(folder, content)
        assert (holding, files > 0) == (0, True)
    kept = [path for path in folder.rglob("*") if len(path.name) == 64]  # alpha's and others'
    root = kept[0].parent.parent
    stray, moved = root / "00" / ("0" * 64), root / "ff" / ("f" * 64)
    for planted, content in ((stray, bytes(4096)), (moved, kept[0].read_bytes())):
        planted.parent.mkdir(mode=0o700, exist_ok=True)
        planted.write_bytes(content)

    engine = start(deployment=deployment, **there)
    assert any(file.exists() for file in kept)
    assert not (stray.exists() or moved.exists()), "what no index could name is gone"
    assert engine.ask(prompt(6), tenant="alpha").cached_tokens == 0
    answer = engine.ask(mine, tenant="alpha", max_tokens=16)
    assert (answer.cached_tokens, answer.tokens) == (PREFIX * BLOCK, expected)
    assert engine.ask(mine, tenant="beta").cached_tokens == 0
    assert engine.governance("check") == [] and engine.governance("scan", True) == []
    engine.close()

    ledger = open_store(deployment.ledger_url)
    with ledger.connect() as connection:
        dead, second = connection.execute(
            select(incarnations).where(incarnations.c.device.is_not(None)).order_by(incarnations.c.id)
        ).all()
        opened = connection.scalars(select(residencies.c.residency).where(residencies.c.incarnation == dead.id))
        closed = connection.scalars(select(releases.c.residency).where(releases.c.incarnation == dead.id))
        assert set(opened) <= set(closed)
        lost, kept_on = (copy_totals(connection, dead.id)[name] for name in ("host", "nvme"))
        verdicts = {one.tier: one for one in copy_coverage(connection).by_tier()}
    ledger.dispose()
    print(lost, kept_on, verdicts)
    assert second.end == "stopped" and dead.end not in (None, "stopped")
    assert lost.stored > lost.destroyed and verdicts["host"].unproven > 0, "nobody saw what became of memory"
    assert verdicts["nvme"].disputed == 0


@pytest.mark.parametrize("remembers", [True, False], ids=["ledger", "control: the ledger is put back too"])
def test_erased_copies_stay_closed_after_keys_and_receipts_were_put_back(start: Start, tmp_path: Path, remembers: bool):
    mine, site, copy = prompt(7), tmp_path / "site", tmp_path / "copy"
    deployment = deployment_with(site)
    there = options(**nvme(site / "tier"))
    engine = start(deployment=deployment, **there)
    engine.ask(mine, tenant="alpha")
    displace(engine)
    engine.close()
    shutil.copytree(site, copy)
    engine = start(deployment=deployment, **there)
    engine.governance("erase", "alpha", None, None)
    assert until(lambda: tier(engine, "nvme")["steps"].get("ended erased", 0) > 0)
    engine.close()
    put_back(copy, site, ("tier", "shred.keys") if remembers else ("",))
    engine = start(deployment=deployment, **there)
    engine.ask(prompt(8), tenant="beta")  # a worker tells what it has with the first step
    cached_tokens = engine.ask(mine, tenant="alpha").cached_tokens
    engine.close()
    assert cached_tokens == (0 if remembers else PREFIX * BLOCK)
    ledger = open_store(deployment.ledger_url)
    with ledger.connect() as connection:
        leaves = connection.scalars(select(events.c.leaf).where(events.c.kind == "orphan-found"))
        found = [body["cause"] for body in map(orjson.loads, leaves) if body["orphan"] == "returned key"]
    ledger.dispose()
    print(found)
    assert len(found) == remembers and all("KVC320" in cause for cause in found), "what came back is a leaf"


def put_back(copy: Path, site: Path, beginnings: tuple[str, ...]) -> None:
    """What begins like this is as it was: also gone, where it was not there yet."""
    for path in [path for path in site.iterdir() if path.name.startswith(beginnings)]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in [path for path in copy.iterdir() if path.name.startswith(beginnings)]:
        if path.is_dir():
            shutil.copytree(path, site / path.name)
        else:
            shutil.copy2(path, site / path.name)
