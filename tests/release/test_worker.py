"""A real worker under a trust configuration: what it starts with, follows, and refuses to go back to."""

from __future__ import annotations

import time
from pathlib import Path

import orjson
import pytest
import structlog
from sqlalchemy import select

from kvcustody.allocator.pool.memory_protocol import UnbackedMemory
from kvcustody.audit.kinds.control_events import SIGNED
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.ledger import events
from kvcustody.clock import SystemClock
from kvcustody.errors import ConfigError, CustodyError
from kvcustody.governance.admission_outcome import Admission
from kvcustody.governance.identity.principal import identify
from kvcustody.governance.release.release_desk import ReleaseWorkflow
from kvcustody.governance.release.store import FolderStore, SqlStore
from kvcustody.governance.settings import Settings, load_settings
from kvcustody.governance.worker.worker import MemoryPlan, Worker, open_worker
from kvcustody.migrations.upgrade import upgrade
from standins.release.release_world import MODEL, PROMPT, READS, Release, policy, worker_settings


def opened(asked: Settings) -> Worker:
    plan = MemoryPlan(lambda blocks: UnbackedMemory(blocks, 1, clock=SystemClock()), 128, 1, 1024)
    return open_worker(asked, plan)


def hit(worker: Worker, tenant: str) -> int:
    for _ in range(2):
        answer = worker.governor.admit(identify(issuer="idp", tenant=tenant), MODEL, PROMPT)
        assert isinstance(answer, Admission), answer
        if tenant == "holder":
            worker.governor.commit([answer.request_id], [len(PROMPT)])
        worker.governor.release(answer.request_id)
        worker.governor.settle()
        worker.governor.step()
    return answer.hit_tokens


def until(worker: Worker, revision: int) -> None:
    """Step the engine until the worker has taken a revision over."""
    deadline = time.monotonic() + 20
    while worker.governor.table.revision != revision:
        assert time.monotonic() < deadline, "the worker did not follow"
        worker.governor.step()
        time.sleep(0.01)


@pytest.mark.parametrize("where", ["folder", "ledger"])
def test_a_worker_follows_its_release(release: Release, tmp_path: Path, where: str) -> None:
    asked = worker_settings(
        tmp_path,
        policy_release="ledger" if where == "ledger" else str(tmp_path / "release"),
        policy_lease_seconds=1,
    )
    if where == "ledger":
        engine = open_store(asked.database_url)
        upgrade(engine)
        release.store = SqlStore(engine)
        release.desk = ReleaseWorkflow(release.store, release.people.trust, clock=SystemClock(), ledger=release.ledger)
    with pytest.raises(ConfigError, match="no active revision"):
        opened(asked)
    release.release_reads()
    with opened(asked) as worker:
        assert hit(worker, "holder") == hit(worker, "reader") == 64
        release.release(policy())
        until(worker, 2)
        assert (hit(worker, "holder"), hit(worker, "reader")) == (64, 0)


def test_a_worker_starts_from_a_signed_bundle_and_from_nothing_older(release: Release, tmp_path: Path) -> None:
    release.desk.propose(policy(READS), release.people.ada, note="x")
    release.approve(1)
    release.desk.propose(policy(), release.people.ada, note="y")
    release.approve(2)
    asked = worker_settings(tmp_path, policy_path=tmp_path / "policy.bundle")
    for revision in (1, 2):
        asked.policy_path.write_bytes(release.desk.bundle(revision))
        with opened(asked) as worker:
            assert worker.governor.table.revision == revision
    asked.policy_path.write_bytes(release.desk.bundle(1))
    with pytest.raises(CustodyError, match="`2` was in effect here already"):
        opened(asked)
    (tmp_path / "mark").unlink()
    with opened(asked) as worker:  # the control: without the mark, the old bundle is as good as new
        assert worker.governor.table.revision == 1


@pytest.mark.parametrize("what", ["a plain document", "a stripped bundle"])
def test_a_worker_with_trust_starts_from_nothing_unsigned(release: Release, tmp_path: Path, what: str) -> None:
    release.desk.propose(policy(), release.people.ada, note="x")
    release.approve(1)
    text = policy().encode()
    if what == "a stripped bundle":
        text = release.desk.bundle(1)
        start = text.index(b'"signatures":[') + len(b'"signatures":[')
        text = text[:start] + text[text.index(b"]", start) :]
    asked = worker_settings(tmp_path, policy_path=tmp_path / "policy.bundle")
    asked.policy_path.write_bytes(text)
    with pytest.raises(CustodyError, match="bundle"):
        opened(asked)
    if what == "a plain document":  # the control: the same file is taken where nobody asked for signatures
        with opened(asked.model_copy(update={"policy_trust": ""})) as worker:
            assert worker.governor.table.revision == 1


def test_a_release_without_trust_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs `policy_trust`"):
        load_settings(policy_release="somewhere")


def test_a_folder_store_needs_its_folder(tmp_path: Path) -> None:
    with pytest.raises(CustodyError, match="No such file"):
        FolderStore(tmp_path / "none").read()


def test_a_worker_that_follows_signed_orders_alone_says_so_at_its_start(release: Release, tmp_path: Path) -> None:
    release.desk.propose(policy(), release.people.ada, note="x")
    release.approve(1)
    settings = worker_settings(tmp_path, policy_path=tmp_path / "policy.bundle")
    settings.policy_path.write_bytes(release.desk.bundle(1))
    with structlog.testing.capture_logs() as said:
        opened(settings).close()
    assert [line["signs"] for line in said if line["event"] == "orders are authenticated"] == [True]
    assert not [line for line in said if line["event"] == "orders are not authenticated"]
    store = open_store(settings.database_url)
    with store.connect() as connection:
        leaves = connection.scalars(select(events.c.leaf).where(events.c.kind == "worker-started")).all()
    store.dispose()
    assert [orjson.loads(leaf)["orders"] for leaf in leaves] == [SIGNED]
    trust = tmp_path / "trust.toml"
    trust.write_text(trust.read_text().replace('roles = ["orders"]', 'roles = ["operator"]'))
    with pytest.raises(ConfigError, match="names no key `orders` with the role `orders`"):
        opened(settings)
