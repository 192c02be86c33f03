"""The worker of a cache layer's tier: what a restart does before anybody asks, and what is left of its keys."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcustody.audit.evidence.copies.copy_coverage import copy_coverage
from kvcustody.audit.store.database.engine import open_store
from kvcustody.errors import ConfigError, CustodyError
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.identity.domain_spec import tenant_owner
from kvcustody.governance.keys.shred_keys import ShredKeys
from kvcustody.governance.settings import load_settings
from kvcustody.governance.tiers.seal_keys import SealKeys
from kvcustody.integrations.lmcache.custody_thread import (
    FILE,
    Chunks,
    ChunkShape,
    CustodyThread,
    keep_shape,
    kept_shape,
)
from standins.integrations import chunk_site
from standins.integrations.chunk_site import CHUNK_BYTES, CHUNK_TOKENS, Chunk, ChunkSite, lives
from standins.waiting import until


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChunkSite]:
    made = ChunkSite(tmp_path, monkeypatch)
    yield made
    made.close()


@pytest.fixture
def opened() -> Iterator[Callable[..., CustodyThread]]:
    threads: list[CustodyThread] = []

    def make(*, kept: bool = False) -> CustodyThread:
        threads.append(CustodyThread(load_settings()))
        if kept:
            threads[-1].open_kept(CHUNK_TOKENS)
        else:
            threads[-1].open(CHUNK_BYTES, CHUNK_TOKENS)
        return threads[-1]

    yield make
    for thread in threads:
        thread.close()


def kill(folder: Path) -> None:
    """A worker that kept two copies, and is killed."""
    child = subprocess.run(
        [sys.executable, chunk_site.__file__, str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        timeout=60,
        check=False,
        capture_output=True,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()[-2000:]


@pytest.mark.system
def test_a_restart_ends_what_is_overdue_and_closes_the_dead_one_before_anybody_asks(
    site: ChunkSite, opened: Callable[..., CustodyThread]
) -> None:
    kill(site.deployment.folder)
    assert len(site.files()) == 2
    assert lives(site.deployment.ledger_url) == [None], "nobody has closed it"
    time.sleep(2.1)
    assert len(site.files()) == 2, "control: files of a dead process end by no one"
    thread = opened(kept=True)
    assert thread.is_open
    assert until(lambda: len(site.files()) == 1)
    assert until(lambda: lives(site.deployment.ledger_url)[0] not in (None, "stopped"))
    order = thread.run(lambda chunks: chunks.governor.call(lambda mine: mine.erase(Selector("acme", "s", None))))
    order.result(10).result(10)
    assert until(lambda: site.files() == []), "an order reaches it, and nobody stored"
    thread.close()
    store = open_store(site.deployment.ledger_url)
    with store.connect() as connection:
        [verdict] = copy_coverage(connection).by_tier()
    store.dispose()
    assert verdict.due >= 2 and verdict.unproven == verdict.disputed == 0, verdict


@pytest.mark.system
def test_without_what_is_kept_a_restart_waits_for_an_object(
    site: ChunkSite, opened: Callable[..., CustodyThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the last one: the same start where nothing says how large objects are."""
    kill(site.deployment.folder)
    time.sleep(2.1)
    monkeypatch.setattr("kvcustody.integrations.lmcache.custody_thread.kept_shape", lambda settings: None)
    thread = opened(kept=True)
    assert not thread.is_open
    with pytest.raises(AssertionError):
        until(lambda: len(site.files()) < 2, seconds=1.0)
    assert lives(site.deployment.ledger_url) == [None]


@pytest.mark.system("a worker without files is not closed by its next start")
def test_a_worker_in_memory_alone_is_closed_by_its_next_start_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: Callable[..., CustodyThread]
) -> None:
    site = ChunkSite(tmp_path, monkeypatch, KVCUSTODY_HOST_TIER_BYTES=str(1 << 20))
    monkeypatch.delenv("KVCUSTODY_NVME_TIER_PATH")
    monkeypatch.delenv("KVCUSTODY_NVME_TIER_BYTES")
    try:
        first = opened()
        named = Chunk(bytes(32), site.salt("acme"))
        assert first.run(lambda chunks: chunks.store(named, memoryview(bytes(CHUNK_BYTES)))).result(20)
        first.close()
        again = opened(kept=True)
        assert again.is_open
        assert not again.run(lambda chunks: chunks.has(named)).result(20)
        assert until(lambda: lives(site.deployment.ledger_url)[:1] == ["stopped"])
    finally:
        site.close()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-7]), "is no shape of chunks"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b"@1", b"@2")), "is no shape of chunks"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b"4096", b"-1")), "is no shape of chunks"),
        (lambda path: path.chmod(0o644), "accessible only to its owner"),
        (lambda path: path.symlink_to(path.rename(path.with_name("other"))), "cannot be opened"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b"4096", b"999999999")), "the largest tier"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b"64", b"32")), "32 tokens a chunk, not 64"),
        (lambda path: path.unlink(), "has objects but no"),
    ],
)  # fmt: skip
def test_a_shape_that_does_not_fit_is_refused_at_start(
    site: ChunkSite, opened: Callable[..., CustodyThread], spoil: Callable[[Path], object], says: str
) -> None:
    first = opened()
    named = Chunk(bytes(32), site.salt("acme"))
    assert first.run(lambda chunks: chunks.store(named, memoryview(bytes(CHUNK_BYTES)))).result(20)
    first.close()
    path = site.tier / FILE
    assert path.stat().st_mode & 0o777 == 0o600
    assert kept_shape(load_settings()) == ChunkShape(chunk_bytes=CHUNK_BYTES, chunk_tokens=CHUNK_TOKENS)
    spoil(path)
    with pytest.raises(ConfigError, match=says):
        opened(kept=True)
    assert len(site.files()) == 1, "what is there stays"


def test_what_cannot_be_opened_is_told_at_start(site: ChunkSite, opened: Callable[..., CustodyThread]) -> None:
    opened().close()
    (site.deployment.folder / "salts").chmod(0o644)
    with pytest.raises(CustodyError, match="scope_salts_path"):
        opened(kept=True)


def test_a_wrong_policy_is_told_before_there_is_an_object(
    site: ChunkSite, opened: Callable[..., CustodyThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not opened(kept=True).is_open, "the control: a right one, and nothing to open"
    monkeypatch.setenv("KVCUSTODY_POLICY_PATH", str(site.deployment.folder / "polcy.yaml"))
    with pytest.raises(ConfigError, match="the setting `policy_path` names the file"):
        opened(kept=True)


def test_a_tenant_that_came_later_is_served(site: ChunkSite, opened: Callable[..., CustodyThread]) -> None:
    """Its owner's secret was not on file when the worker opened its keyring."""
    thread = opened()
    assert thread.run(lambda chunks: chunks.directory.labels()).result(20) == {}
    for tenant in ("acme", "beta", "late"):
        named = Chunk(bytes(32), site.salt(tenant))
        kept = thread.run(
            lambda chunks, named=named: chunks.store(named, memoryview(bytes(CHUNK_BYTES)))  # type: ignore[misc]
        )
        assert kept.result(20), tenant


def test_what_another_process_destroyed_is_not_opened_any_more(
    site: ChunkSite, opened: Callable[..., CustodyThread]
) -> None:
    thread = opened()
    gone, stays = (Chunk(bytes(32), site.salt(tenant)) for tenant in ("acme", "beta"))
    for named in (gone, stays):
        kept = thread.run(
            lambda chunks, named=named: chunks.store(named, memoryview(bytes(CHUNK_BYTES)))  # type: ignore[misc]
        )
        assert kept.result(20)
    assert thread.run(lambda chunks: (chunks.has(gone), chunks.has(stays))).result(20) == (True, True)
    site.keyring.destroy(tenant_owner("api-keys", "acme"), 1)
    assert thread.run(lambda chunks: (chunks.has(gone), chunks.has(stays))).result(20) == (False, True)


def test_every_key_is_wiped_when_it_closes(site: ChunkSite, opened: Callable[..., CustodyThread]) -> None:
    thread = opened()
    named = Chunk(bytes(32), site.salt("acme"))
    assert thread.run(lambda chunks: chunks.store(named, memoryview(bytes(CHUNK_BYTES)))).result(20)
    chunks: Chunks = thread.run(lambda mine: mine).result(20)
    shred, keys = chunks.shred, chunks.keys
    secrets = [shred.secret(key.id) for key in shred.living()]
    catalogue = keys.catalogue()
    assert len(secrets) >= 2 and all(secret.filled for secret in secrets), "control: they were in memory"
    thread.close()
    assert not any(secret.filled for secret in secrets)
    assert catalogue._blocks is None and keys._catalogue is None and not keys._keys
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(shred._file)
    with pytest.raises(CustodyError, match="it is closed"):
        thread.run(lambda mine: None).result(5)


def test_what_was_open_is_closed_where_the_rest_cannot_be(
    site: ChunkSite, opened: Callable[..., CustodyThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    shreds: list[ShredKeys] = []
    sealing: list[SealKeys] = []
    opens, begins = ShredKeys.open.__func__, SealKeys.__init__  # type: ignore[attr-defined]

    def open_noted(cls: type[ShredKeys], *given: object) -> ShredKeys:
        shreds.append(opens(cls, *given))
        return shreds[-1]

    def begin_noted(self: SealKeys, *given: object, **named: object) -> None:
        begins(self, *given, **named)
        self.catalogue()  # a key that has to go
        sealing.append(self)

    monkeypatch.setattr(ShredKeys, "open", classmethod(open_noted))
    monkeypatch.setattr(SealKeys, "__init__", begin_noted)
    (site.deployment.folder / "salts").unlink()
    (site.deployment.folder / "salts").mkdir()  # the last that is opened
    thread = opened()
    with pytest.raises(CustodyError, match="scope_salts_path"):
        thread.run(lambda chunks: None).result(20)
    assert len(shreds) == len(sealing) == 2, "the worker's and our own"
    assert not any(keys._catalogue for keys in sealing)
    for shred in shreds:
        assert not shred._secrets
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(shred._file)
    assert until(lambda: lives(site.deployment.ledger_url) == ["stopped"])


def test_an_error_while_nobody_asks_ends_it_in_order_and_refuses_who_asks_later(
    site: ChunkSite, opened: Callable[..., CustodyThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = opened()
    chunks: Chunks = thread.run(lambda mine: mine).result(20)
    shred = chunks.shred

    def fail(_: Chunks) -> None:
        raise RuntimeError("a step that fails")

    monkeypatch.setattr(thread, "step_worker", fail)
    assert until(lambda: "a step that fails" in thread.failure)
    with pytest.raises(CustodyError, match="a step that fails"):
        thread.run(lambda mine: None).result(5)
    assert not shred._secrets


def test_the_first_shape_of_a_folder_stays(site: ChunkSite) -> None:
    settings = load_settings()
    site.tier.mkdir(mode=0o700)
    keep_shape(settings, ChunkShape(chunk_bytes=8, chunk_tokens=2))
    keep_shape(settings, ChunkShape(chunk_bytes=8, chunk_tokens=2))
    assert [path.name for path in site.tier.iterdir()] == [FILE]
