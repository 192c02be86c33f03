"""The tiers of one worker of vLLM, without vLLM: what is left of keys and threads when they end, or cannot begin."""

from __future__ import annotations

import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcustody.allocator.pool.tensor_memory import TensorMemory
from kvcustody.clock import SystemClock
from kvcustody.errors import ConfigError
from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.erasure.tier_protocol import CompletedErasure
from kvcustody.governance.settings import Settings, load_settings
from kvcustody.governance.tiers.copies.index import CopyLimit, PublishedRun, TierShare, TierTerms
from kvcustody.governance.tiers.open_tiers import tier_plan
from kvcustody.governance.tiers.stores.file_store import FileStore
from kvcustody.governance.tiers.stores.host_arena import HostArena
from kvcustody.governance.tiers.stores.store_protocol import TierStore
from kvcustody.governance.tiers.tier import SealedObject
from kvcustody.governance.tiers.tier_rules import NOT_HERE
from kvcustody.integrations.vllm.tiers import worker_handover, worker_tiers
from kvcustody.integrations.vllm.tiers.copy_directory import CopyDirectory
from kvcustody.integrations.vllm.tiers.layer_groups import CopiedGroup
from kvcustody.integrations.vllm.tiers.tier_messages import (
    CloseTier,
    CopyJob,
    CopyReply,
    CopyRule,
    FetchCopies,
    FetchedCopies,
    NarrowCopies,
    OpenTier,
    SeekCopies,
    SoughtChain,
)
from kvcustody.integrations.vllm.tiers.worker_handover import WorkerHandover
from kvcustody.integrations.vllm.tiers.worker_tiers import BlockBytes, TierThread, WorkerKeys, WorkerTiers
from kvcustody.kernels.segment import SegmentTable
from standins.engines.vllm.deployment import Deployment
from standins.governance.handing_pair import BLOCKS, PEER_LIFE, Pair
from standins.governance.store_servers import VALKEY, StoreServer, servers
from standins.governance.tier_place import ABSOLUTE_US, BLOCK, LAYOUT, STEP, Place, keys_of
from standins.waiting import until


@pytest.fixture
def open_tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], WorkerTiers]:
    named = Deployment(tmp_path / "site").environment() | {
        "KVCUSTODY_HOST_TIER_BYTES": str(1 << 20),
        "KVCUSTODY_NVME_TIER_PATH": str(tmp_path / "tier"),
        "KVCUSTODY_NVME_TIER_BYTES": str(1 << 20),
    }
    for name, value in named.items():
        monkeypatch.setenv(name, value)

    def make() -> WorkerTiers:
        settings = load_settings()
        plan = tier_plan(settings)
        assert plan is not None
        memory = TensorMemory([SegmentTable.from_tensors([torch.zeros(8, 64, dtype=torch.uint8)])])
        return WorkerTiers(
            settings, plan, memory, shard=0, shards=1, software=(), clock=SystemClock(), stack=ExitStack()
        )

    return make


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> list[WorkerKeys]:
    """Whatever a worker opens."""
    opened: list[WorkerKeys] = []
    opens = worker_tiers.open_worker_keys

    def noted(*given: object) -> WorkerKeys:
        opened.append(opens(*given))  # type: ignore[arg-type]
        opened[-1].shred.of_subject(b"somebody")  # so that there is a secret in memory
        return opened[-1]

    monkeypatch.setattr(worker_tiers, "open_worker_keys", noted)
    return opened


RULE = CopyRule(CopyLimit(ABSOLUTE_US, ABSOLUTE_US // 16), TierShare())


def tier_threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name in ("kvcustody-host", "kvcustody-nvme")]


def test_every_key_is_wiped_when_they_close(open_tiers: Callable[[], WorkerTiers], keys: list[WorkerKeys]) -> None:
    tiers = open_tiers()
    [opened] = keys
    secrets = list(opened.shred._secrets.values())
    assert secrets and all(one.filled for one in secrets) and len(tier_threads()) == 2, "control"
    tiers.close()
    tiers.close()
    assert not any(one.filled for one in secrets) and tier_threads() == []
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened.shred._file)


def test_what_was_open_is_closed_where_the_rest_cannot_be(
    open_tiers: Callable[[], WorkerTiers], keys: list[WorkerKeys], tmp_path: Path
) -> None:
    (tmp_path / "tier").write_text("no folder")
    with pytest.raises(ConfigError, match="nvme_tier_path"):
        open_tiers()
    [opened] = keys
    assert not opened.shred._secrets and tier_threads() == [], "the host tier had begun"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened.shred._file)
    (tmp_path / "tier").unlink()
    open_tiers().close()


ADA, ACME = Selector(tenant="acme", subject="ada"), Selector(tenant="acme")


@pytest.mark.parametrize("selector", [ADA, ACME], ids=["subject", "tenant"])
@pytest.mark.parametrize("is_told", [True, False], ids=["told", "control: nobody tells the worker"])
def test_what_an_erasure_destroyed_ends_again_before_a_load(tmp_path: Path, selector: Selector, is_told: bool) -> None:
    """Tier, keys and receipts are put back. The scheduler tells its workers; it cannot name a tenant's subjects."""
    site, copy = tmp_path / "site", tmp_path / "copy"
    site.mkdir()
    place = Place(site, "nvme")
    labels = [place.label("acme", "ada"), place.label("acme")]
    for label in labels:
        assert place.keep(label, "prompt", STEP) == STEP
    _close(place)
    shutil.copytree(site, copy)
    place.world.open()
    place.open()
    place.tier.erase("e-1", selector, place.world.clock.now_us())
    _close(place)
    shutil.rmtree(site)
    shutil.copytree(copy, site)
    place.world.clock.advance(1_000_000)
    place.world.open()
    complete = CompletedErasure("e-1", selector, place.world.clock.utc_us())
    replies = _replies(place, [complete] if is_told else [])
    assert replies[0].opened is not None and replies[0].opened.returned_keys == 0, "the receipts went back too"
    assert sum(reply.returned_keys for reply in replies) == 2 * is_told
    place.open()
    brought = [place.bring(label, "prompt", STEP) for label in labels]
    place.world.close()
    assert brought == ([0, 0] if is_told else [STEP, STEP])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], StoreServer]]:
    yield from servers(tmp_path_factory)


FULL, WINDOW = CopiedGroup(), CopiedGroup(1, 2)
CHAIN = [bytes([at]) * 32 for at in range(1, 3 * STEP + 1)]


def store_group(place: Place, label: DomainLabel, group: CopiedGroup, first: int, last: int) -> None:
    """Blocks of one layer group, as the scheduler names them."""
    keys, now_us = group.keys(CHAIN[first:last]), place.world.clock.now_us()
    parent = group.key(CHAIN[first - 1]) if first else bytes(32)
    run = PublishedRun(label, keys, parent, first, now_us, now_us + ABSOLUTE_US, now_us + ABSOLUTE_US)

    def read(at: int, count: int, into: memoryview) -> None:
        into[:] = bytes([group.number]) * (count * BLOCK)

    assert place.tier.store(run, read) == last - first


def test_of_several_layer_groups_what_a_hit_needs_is_sought(
    tmp_path: Path, server: Callable[[str], StoreServer]
) -> None:
    """Of full attention all, of a window what is before the last place where objects of both end; of others nothing."""
    there = server(VALKEY)
    first, second = (Place(tmp_path, "remote", server=there, worker=name, prefix=tmp_path.name) for name in ("a", "b"))
    acme = first.label("acme")
    assert second.label("beta").tenant == "beta" and second.label("acme") == acme
    store_group(first, acme, FULL, 0, 3 * STEP)
    store_group(first, acme, WINDOW, 2 * STEP - 2, 2 * STEP)
    replies = deque[CopyReply]()
    thread = _thread(second, "remote", second.store, replies)
    thread.put(OpenTier(0, "remote", 16, {(one, "internal"): RULE for one in ("acme", "beta")}))
    chains = tuple(SoughtChain(group, group.keys(CHAIN)) for group in (FULL, WINDOW))
    whose = [(acme, 3 * STEP), (acme, 2 * STEP - 1), (second.label("beta"), 3 * STEP)]
    for number, (label, last) in enumerate(whose, 1):
        thread.put(SeekCopies(number, "remote", label, 0, chains, 0, last, RULE))
    thread.put(CloseTier(9, "remote"))
    thread.join()
    sought = [{(one.group, one.end) for one in reply.sought} for reply in replies if 0 < reply.number < 9]
    full = {(0, STEP), (0, 2 * STEP), (0, 3 * STEP)}
    assert sought == [full | {(1, 2 * STEP)}, full, set()]
    first.tier.close()
    for place in (first, second):
        place.staging.close()
        place.world.close()


def _thread(place: Place, name: str, store: TierStore, replies: deque[CopyReply], **terms: Any) -> TierThread:
    memory = TensorMemory([SegmentTable.from_tensors([torch.zeros(8, BLOCK, dtype=torch.uint8)])])
    world = place.world
    return TierThread(
        name,
        store,
        WorkerKeys(world.keyring, place.folder / "keys.json", world.shred),
        TierTerms(LAYOUT, BLOCK, 16, lambda *_: NOT_HERE, object_blocks=STEP, **terms),
        BlockBytes(memory),
        world.clock,
        replies,
    )


def _replies(place: Place, completed: list[CompletedErasure]) -> list[CopyReply]:
    """What a worker's thread answers from its opening to its close, with what a directory sends between."""
    jobs: list[CopyJob] = []

    def send(job: CopyJob) -> int:
        jobs.append(job._replace(number=len(jobs) + 1))
        return len(jobs)

    send(OpenTier(0, "nvme", 16, {("acme", "internal"): RULE}))
    directory = CopyDirectory("nvme", 1, send)
    for complete in completed:
        assert directory.erase_returned(complete) == 0
    send(CloseTier(0, "nvme"))
    replies = deque[CopyReply]()
    thread = _thread(place, "nvme", FileStore(place.folder / "tier", place.capacity), replies)
    for job in jobs:
        thread.put(job)
    thread.join()
    return list(replies)


def _close(place: Place) -> None:
    place.tier.close()
    place.world.close()


class Decode:
    """The decode half of a pair as vLLM's worker has it: a tier's thread, and what it fetches from the prefill half."""

    def __init__(self, folder: Path) -> None:
        self.pair = Pair(folder)
        self.label = self.pair.prefill.label("acme", "ann")
        assert self.pair.prefill.keep(self.label, "prompt", BLOCKS) == BLOCKS
        address = ":".join(map(str, self.pair.server.address))
        lines = [f"  {name}: {{address: '{address}', key: '{key.verifier}'}}" for name, key in self.pair.keys.items()]
        peers = folder / "peers.yaml"
        peers.write_text("schema: kvcustody/handover-peers@1\nworkers:\n" + "\n".join(lines) + "\n")
        settings = Settings(
            policy_path=folder / "policy.yaml",
            database_url=f"sqlite:///{folder / 'ledger.db'}",
            worker_name="decode",
            handover_peers_path=peers,
            handover_key_path=folder / "decode.key",
        )
        self.replies = deque[CopyReply]()
        self.thread = _thread(self.pair.decode, "host", HostArena(1 << 20), self.replies, encloses=True)
        self.thread.put(OpenTier(1, "host", 16, {("acme", "internal"): RULE}))
        self.stack = ExitStack()
        self.handover = WorkerHandover(settings, self.thread, self.replies, self.pair.clock, 0, self.stack)
        self.handover.begin("host", PEER_LIFE)

    def fetch(self, number: int) -> FetchCopies:
        """A job with a ticket of its own."""
        text = self.pair.ticket(self.label, "prompt")
        return FetchCopies(number, "host", self.pair.read(text), text, self.label, keys_of("prompt", BLOCKS), RULE)

    def fetched(self, number: int) -> FetchedCopies | None:
        found = until(lambda: [reply for reply in self.replies if reply.number == number])
        return found[0].fetched

    def close(self) -> None:
        self.stack.close()
        self.thread.put(CloseTier(0, "host"))
        self.thread.join()
        self.pair.close()


@pytest.fixture
def decode(tmp_path: Path) -> Iterator[Decode]:
    made = Decode(tmp_path)
    yield made
    made.close()


def test_what_a_fetch_brings_is_not_kept_where_policy_has_changed_meanwhile(decode: Decode) -> None:
    """The fetch's rule is the earlier one, and wider. Controls: one that says nothing of it, and none."""
    held, ask = threading.Event(), decode.pair.tampers

    def slow(objects: list[SealedObject]) -> list[SealedObject]:
        held.wait(5)
        return ask(objects)

    decode.pair.tampers = slow
    for number, rules, blocks in ((2, {}, 0), (4, {("acme", "internal"): RULE}, BLOCKS)):
        held.clear()
        decode.handover.put(decode.fetch(number))
        decode.thread.put(NarrowCopies(number + 1, "host", rules))
        until(lambda done=number + 1: any(reply.number == done for reply in decode.replies))  # type: ignore[misc]
        held.set()
        assert (kept := decode.fetched(number)) is not None and kept.blocks == blocks


def test_a_peer_sends_no_more_than_the_blocks_of_its_ticket_have(decode: Decode) -> None:
    decode.pair.tampers = lambda objects: [one._replace(data=one.data + bytes(16_384)) for one in objects]
    decode.handover.put(decode.fetch(2))
    assert decode.fetched(2) == FetchedCopies(0, 0, "too-large")
    decode.pair.tampers = lambda objects: objects
    decode.handover.put(decode.fetch(3))
    assert (kept := decode.fetched(3)) is not None and kept.blocks == BLOCKS, "control"


def test_a_fetch_that_waited_behind_others_for_too_long_is_not_made(
    decode: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_handover, "FETCH_SECONDS", -1.0)
    decode.handover.put(decode.fetch(2))
    assert decode.fetched(2) == FetchedCopies(0, 0, "late")
    assert decode.pair.given == [], "nobody was asked"
