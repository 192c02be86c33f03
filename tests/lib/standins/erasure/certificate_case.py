"""An erasure with its certificate, and what verifies it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sqlalchemy import Engine

from kvcustody.audit.kinds import EpochRaised, EpochsTaken, ReceiptRecorded
from kvcustody.audit.reports.document import Document
from kvcustody.audit.reports.erasure.certificate import issue, new_opening
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.tiers.copy_event import CopyEvent
from kvcustody.governance.tiers.copy_leaves import copy_leaves
from standins.builders import writer
from standins.robust.custody_world import CustodyWorld

Steps = Sequence[CopyEvent]
ANN = Selector("alpha", "alpha-user-1")


KEY = SigningKey.generate("example.com/ledger")


VKEYS = [str(KEY.verifier)]


class Case:
    """A world in which one subject was erased, and the certificate of it."""

    def __init__(
        self, store: Engine, folder: Path, *, lost: bool = False, copies: Steps = (), later: Steps = ()
    ) -> None:
        self.dropping, self.folder, self.store = False, folder, store
        self.world = CustodyWorld(
            store,
            folder,
            seed=4,
            blocks=200,
            chosen=lambda event: lost and self.dropping and isinstance(event, ReceiptRecorded) and event.shard == 1,
        )
        self.world.break_a_block = lambda: None  # type: ignore[method-assign]
        self.world.run(60)
        self.dropping = True
        self.done = self.world.governor.erase(ANN)
        self.world.lengths = {one: n for one, n in self.world.lengths.items() if one in self.world.governor.running}
        self.world.settle()
        self.record(copies)
        self.follow_epochs()
        self.world.close()
        self.sign()
        self.opening = new_opening(ANN.text())
        self.document = self.issue()
        self.record(later)
        self.world.writer.close()

    def follow_epochs(self) -> None:
        """Its epochs on record, and doors: one that follows, one that does not, and one that ended before it did."""
        now_us, erasure = self.world.clock.now_us(), self.done.erasure
        raised = [("subject", 6), ("shared", 8)]
        self.world.writer.submit([EpochRaised(now_us, erasure, ANN.tenant, scope, number) for scope, number in raised])
        assert self.world.writer.flush()
        for name, versions in (("door-1", (5, 8, 9)), ("door-2", (5, 6)), ("door-3", (7,))):
            door = writer(self.store, self.folder / name, worker=name, clock=self.world.clock)
            door.submit([EpochsTaken(now_us + version, name, version, "cd" * 32) for version in versions])
            if name == "door-3":
                door.record_end()
            assert door.flush()
            door.close()

    def record(self, copies: Steps) -> None:
        """What a tier said of its copies; the erasure that ended them is this one."""
        events = [one._replace(erasure=self.done.erasure if one.erasure else "") for one in copies]
        self.world.writer.submit(copy_leaves("nvme", events))
        assert self.world.writer.flush()

    def sign(self) -> None:
        """A checkpoint over all that is there."""
        signer = CheckpointSigner(self.store, [KEY], memory=self.folder / "signed", clock=self.world.clock)
        signer.sign_once()

    def issue(self) -> Document:
        """The certificate as it stands."""
        with self.store.connect() as connection:
            return issue(connection, self.done.erasure, KEY, self.opening, now_us=self.world.clock.utc_us())

    @property
    def data(self) -> bytes:
        return self.document.to_bytes()
