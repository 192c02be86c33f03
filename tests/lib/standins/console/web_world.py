"""A service with two tenants' custody, denials, a finding and a policy in effect, and people in every role."""

from __future__ import annotations

import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvcustody.audit.evidence.subjects.pseudonym_directory import SubjectDirectory
from kvcustody.audit.kinds import (
    CustodyEnded,
    DecisionRecorded,
    Event,
    HitCounters,
    OrphanFound,
    PolicyActivated,
    ReceiptRecorded,
    ResidencyOpened,
    ResidencyReleased,
    WorkerStarted,
)
from kvcustody.audit.kinds.block_runs import gather
from kvcustody.audit.leaf import Context, leaves
from kvcustody.audit.tlog.signing_key import create_signing_key
from kvcustody.console.documents import ConsoleDocuments
from kvcustody.console.web.app import Console
from kvcustody.governance.api.app import create_app
from kvcustody.governance.api.http.server import serve
from kvcustody.governance.release.release_desk import ReleaseWorkflow
from kvcustody.governance.release.signer import open_signer
from kvcustody.governance.release.store import SqlStore
from kvcustody.governance.release.trust import write_trust
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.ingest.check_leaves import read_batch, write_batch
from kvcustody.governance.service.service import Service, open_service
from kvcustody.governance.service.settings import ReportFolder, ServiceSettings
from kvcustody.policies import library
from kvcustody.policies.document.digest import digest
from kvcustody.policies.reading.load_policy import load_policy

MARKUP = '<img src=x onerror="window.broken=1"><script>window.broken=1</script>'
_SECOND = 1_000_000
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"  # of acme's openings
SIGNERS = {"author": "author", "approver": "approver", "tenant-admin@acme": "owner"}


def policy_source() -> str:
    """The library's policy, with `labs` as the reader of a grant, so that an owner's consent is needed."""
    return library.source("regulated-saas").replace("acme-labs", "labs")


def write_draft(page: Any, text: str) -> None:
    """Put a text into the draft page's editor, once it is open; the cursor is at its end."""
    page.locator("#editor-status").wait_for(state="attached")
    page.get_by_role("textbox", name="Document", exact=True).focus()
    page.keyboard.press("Control+a")
    page.keyboard.press("Delete")
    page.keyboard.insert_text(text)
    page.wait_for_function("text => document.getElementById('source').value === text", arg=text)


class Keys(dict[str, str]):
    """A key for each person, who is enrolled when first asked for: `role`, or `role@tenant`."""

    def __init__(self, service: Service) -> None:
        super().__init__()
        self._principals = service.principals

    def __missing__(self, name: str) -> str:
        role, _, tenant = name.partition("@")
        self._principals.enrol(name, [Role(role)], tenant=tenant or None, by="test")
        self[name] = self._principals.issue_key(name, days=1, by="test").key
        return self[name]


class World:
    """An open service, its address, a key for each person, and signing keys for those who sign."""

    def __init__(self, folder: Path, database_url: str | None = None) -> None:
        self.folder = folder
        self.database_url = database_url or f"sqlite:///{folder}/ledger.db"
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.url = f"http://{self.address}"
        self.service: Service = open_service(self._settings(), documents=ConsoleDocuments())
        self.keys = Keys(self.service)
        self.worker = FakeWorker(self.service, "worker")
        self.worker.day()

    def _settings(self) -> ServiceSettings:
        keys = {name: create_signing_key(self.folder / f"{name}.key", name) for name in SIGNERS}
        listed = [
            (str(key.verifier), SIGNERS[name], "acme" if SIGNERS[name] == "owner" else None)
            for name, key in keys.items()
        ]
        own = create_signing_key(self.folder / "orders.key", "orders")
        listed.append((str(own.verifier), "orders", None))
        trust = self.folder / "trust.toml"
        trust.write_text(write_trust("test", listed))
        share = self.folder / "share"
        share.mkdir(mode=0o700, exist_ok=True)
        return ServiceSettings(
            report_destinations=(ReportFolder(kind="folder", name="share", path=share, tenants=("acme",)),),
            report_seconds=0.2,
            database_url=self.database_url,
            subject_keys_url=f"sqlite:///{self.folder / 'people.db'}",
            state_path=self.folder / "state",
            listen=self.address,
            signing_key_path=self.folder / "signing.key",
            checkpoint_seconds=0.05,
            requests_per_second=1e6,
            requests_burst=1_000_000,
            policy_trust=trust,
            order_key_path=self.folder / "orders.key",
        )

    def release(self, note: str = "joint evaluation") -> None:
        """Put the policy into effect, where none is, as its signers would from the command line."""
        desk = ReleaseWorkflow(
            SqlStore(self.service.engine),
            self.service.policies.trust,
            clock=self.service.clock,
            ledger=self.service.writer,
        )
        if desk.state().active is not None:
            return
        author, approver, owner = (open_signer(Path(self.signing_key(name))) for name in SIGNERS)
        desk.propose(policy_source(), author, note=note)
        desk.approve(1, approver, cells=desk.review(1).cells)
        for opening in {opening.id for opening in desk.review(1).missing}:
            desk.consent(1, opening, owner)
        desk.activate(1, approver)
        self.worker.activate(1, policy_source())

    def signing_key(self, name: str) -> str:
        """The file of a person's signing key."""
        return str(self.folder / f"{name}.key")


class FakeWorker:
    """Ships what a worker with memory would ship, through the service's own intake."""

    def __init__(self, service: Service, name: str) -> None:
        self.service, self.name = service, name
        self.incarnation = uuid.uuid4().hex
        self.offset_us = service.clock.utc_us() - 90_000 * _SECOND  # it started more than a day ago
        service.fleet.register("worker", self.incarnation, self.offset_us)
        self.directory = SubjectDirectory(clear_names=True)
        self.context = Context(self.incarnation, self.offset_us, self.directory)
        self.sequence = self.residency = 0
        self.generation = 10

    @property
    def now_us(self) -> int:
        """The worker's boot clock now."""
        return self.service.clock.utc_us() - self.offset_us

    def ship(self, events: list[Event]) -> None:
        """One batch; it is durable when this returns."""
        shipped: list[bytes] = []
        for event in events:
            self.sequence += 1
            shipped += [leaf.data for leaf in leaves(event, self.context, self.sequence)]
        names = self.directory.fresh()
        self.directory.settle(names)
        batch = read_batch(write_batch(names, shipped), self.service.fleet.sender("worker", self.incarnation))
        self.service.ingest.put("worker", self.incarnation, batch)
        self.service.fleet.received(self.incarnation, batch.last_sequence)
        self.service.fleet.heard("worker", self.incarnation, revision=1)

    def activate(self, revision: int, source: str) -> None:
        """Take a revision over, as a worker that follows the release does."""
        policy = load_policy(source, name="policy")
        about = (revision, policy.name, policy.profile.value, digest(policy))
        self.ship([PolicyActivated(self.now_us, *about, "approver")])

    def day(self) -> None:
        """A day of work: what ended in time, one that was late, what is held now, denials, a finding."""
        start, now = 80_000 * _SECOND, self.now_us
        events: list[Event] = [WorkerStarted(_SECOND, self.name, 1000, 1, 4096, "cpu", "test")]
        for place in range(40):
            at = start - 80_000 * _SECOND + 10_000 * _SECOND + place * 1900 * _SECOND
            tenant = ("acme", "acme", "labs")[place % 3]
            events += self.ended(at, tenant, f"user-{place % 5}", late=place == 30)
        for place in range(12):
            at = now - (place + 1) * 120 * _SECOND
            events += self.held(at, ("acme", "labs")[place % 2], f"user-{place % 4}")
        for rule, owner, requests in (("no-restricted", "acme", 41), ("default-deny", "labs", 7)):
            events.append(HitCounters(now, "acme", owner, "reuse", "deny", rule, 1, now - 60 * _SECOND, requests, 3, 9))
        events.append(
            DecisionRecorded(now, "reuse", "deny", "labs", "acme", "restricted", ("no-restricted",), 1, "grant", 1)
        )
        runs = self.runs(2)
        events.append(
            OrphanFound(
                now,
                1,
                1,
                "hold without residency",
                "lost finish",
                "acme",
                5 * _SECOND,
                runs,
                "fenced",
                "resolved",
            )
        )
        self.ship(events)

    def strange(self, tenant: str, text: str) -> None:
        """A session, a cause, an outcome and a rule with this text, of one tenant."""
        now = self.now_us
        found = (5 * _SECOND, self.runs(2), "fenced", text)
        self.ship(
            [
                *self.held(now, tenant, "user-3", text),
                OrphanFound(now, 2, 2, "hold without residency", text, tenant, *found),
                HitCounters(now, tenant, tenant, "reuse", "deny", text, 1, now, 5, 3, 9),
            ]
        )

    def runs(self, blocks: int) -> Any:
        """Blocks never handed out before."""
        first = self.generation
        self.generation += blocks
        return gather(np.arange(blocks, dtype=np.int64), np.arange(first, first + blocks, dtype=np.int64))

    def ended(self, at: int, tenant: str, subject: str, *, late: bool = False) -> list[Event]:
        """A request from its opening to the receipt of its end."""
        self.residency += 1
        blocks, lag = 3 + self.residency % 6, 3 * _SECOND if late else 2000
        runs, end = self.runs(blocks), at + 100_000
        due = (tenant, "internal", runs, "expired", end, end + 20, end, _SECOND, at + 10**10)
        return [
            self.opened(at, tenant, subject, runs),
            ResidencyReleased(end, self.residency, tenant, "finish", (), 0),
            CustodyEnded(end + 20, *due),
            ReceiptRecorded(
                end + lag, self.residency, 0, tenant, "memset", "cpu:0", 4096 * blocks, end + 100, end + lag,
                "full", 1.0, blocks, "ok", runs,
            ),
        ]  # fmt: skip

    def held(self, at: int, tenant: str, subject: str, session: str | None = None) -> list[Event]:
        """A request that runs, or one whose hold has not ended."""
        self.residency += 1
        made: list[Event] = [self.opened(at, tenant, subject, self.runs(4), session)]
        if self.residency % 3:
            made.append(ResidencyReleased(at + 1000, self.residency, tenant, "finish", (), at + 1800 * _SECOND))
        return made

    def opened(self, at: int, tenant: str, subject: str, runs: Any, session: str | None = None) -> Event:
        limit = at + 8 * 3600 * _SECOND
        reasons = ("own-scope",)
        opened = ResidencyOpened(
            at, self.residency, tenant, subject, session, False, "internal", (), (), reasons, 1, limit, runs
        )
        return opened._replace(trace=TRACE) if tenant == "acme" else opened


@contextmanager
def running(folder: Path, database_url: str | None = None) -> Iterator[World]:
    """A world that answers at its address; without `database_url` on a SQLite file."""
    world = World(folder, database_url)
    ready = threading.Event()
    app = create_app(world.service, pages=Console(world.service))
    thread = threading.Thread(target=serve, args=(world.service,), kwargs={"app": app, "ready": ready.set})
    thread.start()
    try:
        assert ready.wait(30)
        yield world
    finally:
        world.service.stopping.set()
        thread.join(30)
        world.service.close()
