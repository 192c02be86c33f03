"""docs/how-to: every page runs in a folder of its own, and prints what it shows."""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
import torch
from sqlalchemy import Engine

from kvcustody.allocator.pool.tensor_memory import TensorMemory, TensorSpec
from kvcustody.audit.evidence.subjects.subject_key_store import open_subject_keys
from kvcustody.audit.kinds import ResidencyOpened, WorkerStarted
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.leaf_tables import erasure_results, erasures
from kvcustody.audit.tlog.signing_key import read_signing_key
from kvcustody.clock import SystemClock
from kvcustody.governance.admission_outcome import Admission
from kvcustody.governance.identity.domain_spec import tenant_owner
from kvcustody.governance.identity.principal import identify
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.root_key_wrapping import open_wrapping
from kvcustody.governance.keys.wrapped_key_store import FileKeyStore
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.service import open_service
from kvcustody.governance.service.settings import ServiceSettings
from kvcustody.governance.settings import Settings
from kvcustody.governance.worker.worker import MemoryPlan, open_worker
from kvcustody.testkit.tiny_model import tiny_model
from standins import builders
from standins.docs.recorded_page import RECORDS, Session, normal, played, terminal
from standins.postgres import database_like
from standins.service.service_world import settings_in
from standins.waiting import until

PAGES = {page.stem: page for page in (Path(__file__).parents[2] / "docs" / "how-to").glob("*.md")}
BINDS = {"CASE": "opened: ([0-9a-f]{32})", "ERASURE": "requested: ([0-9a-f]{32})"}
MODEL = "5f0c" * 16
IDENTITY = tiny_model(
    weights_digest="sha256:w", tokenizer_digest="sha256:t", chat_template="template-1", kv_layout="nhd"
)
SPEC = TensorSpec(layers=1, kv_heads=1, head_dim=8, block_tokens=16, dtype=torch.float16)
POLICY = Path(__file__).parents[2] / "policies" / "library" / "regulated-saas.yaml"
VARIES = (
    r"leaves \d\.\d records",  # events of one batch share a record, and how many come together varies
    r"[\d.]+ leaves and \S+ on disk a request; \S+ [kMG]B",
    r"(kvcustody\.example/ledger/\S+)\s+\d+\s+(\d+|-)",
    r"\d{4}-\d\d-\d\d",
    r"kvce_\S+",
    r"[0-9a-f]{16}\+[0-9a-f]{8}\+\S+",
    r"\b[0-9a-f]{8,64}\b",
    r"\b\d+(\.\d+)? ?(ms|s|MiB|KiB|GiB)\b",
    r"\b\d+ (checkpoints?|signed|verified|root leaves|leaves|rows)\b",  # how often it was sealed meanwhile
    r"(system|tenant/acme)\s+\d+",
)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory, migrated: Path) -> Path:
    """A folder with what the pages begin with: a signed ledger that knows dana, and the keys of a worker."""
    folder = tmp_path_factory.mktemp("deployed")
    shutil.copy(migrated, folder / "kvcustody.db")
    url = f"sqlite:///{folder}/kvcustody.db"
    settings: ServiceSettings = settings_in(folder, database_url=url, root_interval_seconds=0.05)
    engine = open_store(url, timeout_seconds=5.0)
    with open_service(settings) as service:
        service.principals.enrol("dana", [Role.DPO], by="test")
        until(lambda: _is_signed(engine, service.verdict.troubles()))
    engine.dispose()
    (folder / "ledger.vkey").write_text(f"{read_signing_key(folder / 'signing.key').verifier}\n")
    shutil.copy(folder / "kvcustody.db", folder / "backup.db")
    ring = Keyring(
        FileKeyStore(folder / "kvcustody-keys.json"),
        open_wrapping("generated", folder / "kvcustody-root.key"),
        SystemClock(),
    )
    ring.ensure([tenant_owner("apikey", "acme")])
    ring.close()
    return folder


def _is_signed(engine: Engine, troubles: tuple[object, ...]) -> bool:
    with engine.connect() as connection:
        sizes = "SELECT (SELECT max(size) FROM checkpoints), (SELECT max(size) FROM signed_checkpoints)"
        sealed, signed = connection.exec_driver_sql(sizes).one()
        left = connection.exec_driver_sql("SELECT count(*) FROM unsealed_heads").scalar()
    return sealed is not None and sealed == signed and not left and not troubles


def died(folder: Path) -> None:
    """A worker that held three residencies of ada, and ended without a word."""
    url = f"sqlite:///{folder}/kvcustody.db"
    engine, keys = open_store(url, timeout_seconds=5.0), open_subject_keys(url, None, clear=False)
    writer = builders.writer(engine, folder / "spill-gpu-1", worker="gpu-1", keys=keys)
    now_us = SystemClock().now_us()
    writer.submit([WorkerStarted(now_us, "gpu-1", 8, 1, 4096, "cpu", "test")])
    writer.submit(
        [
            ResidencyOpened(now_us, number, "acme", "ada", None, False, "internal", (), (), ("own",), 1, 9)
            for number in range(3)
        ]
    )
    assert writer.flush(60)
    writer.close(60)
    engine.dispose()


def owed(folder: Path) -> bool:
    """Whether an erasure was asked for that nobody has answered."""
    with closing(sqlite3.connect(folder / "kvcustody.db")) as connection:
        asked, answered = (
            connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in (erasures.name, erasure_results.name)
        )
    return bool(asked > answered)


@contextmanager
def serving(folder: Path) -> Iterator[Callable[[], None]]:
    """A worker that has served ada; gives what has it do its next steps, until all that it was asked for is done."""
    settings = Settings(
        worker_name="gpu-0",
        policy_path=POLICY,
        database_url=f"sqlite:///{folder}/kvcustody.db",
        signing_key_path=folder / "signing.key",
        keyring_path=folder / "kvcustody-keys.json",
        root_key_path=folder / "kvcustody-root.key",
        scope_token_key_path=folder / "scope.key",
        spill_path=folder / "spill",
        erasure_poll_ms=10,
        checkpoint_seconds=0.05,
        root_interval_seconds=0.05,
    )
    memory = MemoryPlan(lambda blocks: TensorMemory.allocate(blocks, SPEC), 64, 1, SPEC.bytes_per_block)
    with open_worker(settings, memory) as worker:
        who = identify(issuer="apikey", tenant="acme", verified={"subject": "ada"})
        got = worker.governor.admit(who, IDENTITY, list(range(80)))
        assert isinstance(got, Admission)
        worker.governor.commit([got.request_id], [80])
        worker.governor.release(got.request_id)

        def steps() -> None:
            until(lambda: not owed(folder), meanwhile=step)

        def step() -> None:
            worker.governor.step()
            worker.writer.flush(20)
            time.sleep(0.01)

        for _ in range(20):
            step()
        yield steps


@pytest.mark.system("a how-to page no longer runs, or prints something else")
@pytest.mark.parametrize("page", sorted(PAGES))
def test_a_page_runs_as_recorded(page: str, deployed: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder = tmp_path / "here"
    shutil.copytree(deployed, folder)
    given, after_each = {"MODEL": MODEL}, lambda: None
    if page == "move-to-postgresql":
        given["DATABASE"] = request.getfixturevalue("empty_database")
    text = PAGES[page].read_text(encoding="utf-8")
    with terminal(folder), ExitStack() as stack:
        if page == "read-a-finding":
            died(folder)
        if page == "answer-an-erasure":
            after_each = stack.enter_context(serving(folder))
        shown = played(text, Session(folder, BINDS, given, after_each=after_each))
    if os.environ.get(RECORDS):
        PAGES[page].write_text(shown, encoding="utf-8")
        return
    assert normal(shown, *VARIES) == normal(text, *VARIES)


def test_every_page_is_a_task_with_commands() -> None:
    """In the imperative, short, and it runs."""
    assert len(PAGES) >= 8
    for page in PAGES.values():
        text = page.read_text(encoding="utf-8")
        assert text.startswith("# ") and "\n$ kvcustody " in text and "\nMore: " in text, page.stem
        assert len(text.split()) < 700, page.stem


@pytest.fixture
def empty_database(postgres: str) -> Iterator[str]:
    with database_like(postgres) as url:
        yield url
