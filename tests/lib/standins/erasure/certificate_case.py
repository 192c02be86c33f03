"""An erasure with its certificate, and what verifies it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sqlalchemy import Engine

from kvcustody.audit.kinds import ReceiptRecorded
from kvcustody.audit.reports.document import Document
from kvcustody.audit.reports.erasure.certificate import issue, new_opening
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.tiers.copy_event import CopyEvent
from kvcustody.governance.tiers.copy_leaves import copy_leaves
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
        self.dropping = False
        self.world = CustodyWorld(
            store,
            folder,
            seed=4,
            blocks=200,
            chosen=lambda event: (
                lost and self.dropping and isinstance(event, ReceiptRecorded) and event.shard == 1
            ),
        )
        self.world.break_a_block = lambda: None  # type: ignore[method-assign]
        self.world.run(60)
        self.dropping = True
        self.done = self.world.governor.erase(ANN)
        self.world.lengths = {
            one: n for one, n in self.world.lengths.items() if one in self.world.governor.running
        }
        self.world.settle()
        self.record(copies)
        self.world.close()
        self.folder, self.store = folder, store
        self.sign()
        self.opening = new_opening(ANN.text())
        self.document = self.issue()
        self.record(later)
        self.world.writer.close()

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
