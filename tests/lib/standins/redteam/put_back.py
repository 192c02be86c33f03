"""A tier with its keys, of which a copy is put back as it was before an erasure."""

from __future__ import annotations

import shutil
from pathlib import Path

from kvcustody.audit.kinds import Event, OrphanFound
from kvcustody.governance.erasure.erasure_inbox import ErasureInbox
from kvcustody.governance.erasure.erasure_run import ErasureRunner
from standins.governance.tier_place import Place

OBJECTS = 5
_RECEIPTS = "shred.keys.destroyed"


class Deployment:
    """A tier on files, of which copies can be taken and put back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.place = Place(folder, "nvme")
        self.label = self.place.label("acme", "ada")
        for number in range(OBJECTS):
            assert self.place.keep(self.label, f"p{number}", 4) == 4

    def stop(self) -> None:
        self.place.store.close()  # type: ignore[attr-defined]
        self.place.world.close()

    def start(self) -> None:
        self.place.world.open()
        self.place.open()

    def copy(self, *, receipts: bool = False) -> Path:
        """A copy of the tier's folder and of the file of keys, while nothing runs."""
        copy = self.folder.with_name("copy")
        leave = shutil.ignore_patterns() if receipts else shutil.ignore_patterns(_RECEIPTS)
        self.stop()
        shutil.copytree(self.folder, copy, ignore=leave)
        self.start()
        return copy

    def put_back(self, copy: Path, *, receipts: bool) -> None:
        self.stop()
        shutil.rmtree(self.folder / "tier")
        if receipts:
            (self.folder / _RECEIPTS).unlink(missing_ok=True)
        shutil.copytree(copy, self.folder, dirs_exist_ok=True)
        self.start()

    def opened(self) -> int:
        return sum(self.place.bring(self.label, f"p{number}", 4) > 0 for number in range(OBJECTS))

    def runner(self, found: list[Event]) -> ErasureRunner:
        """What a worker has its erasures carried out by; `found` takes what goes on record."""
        runner = ErasureRunner(None, self.place.world.clock, found.extend, None, found.extend)  # type: ignore[arg-type]
        runner.tiers = [self.place.tier]
        return runner


def check_at_start(deployment: Deployment, inbox: ErasureInbox, findings: list[str]) -> None:
    """Look as a worker does when it starts; what goes on record."""
    found: list[Event] = []
    deployment.runner(found).destroy_returned(inbox.completed)
    assert [event.orphan for event in found if isinstance(event, OrphanFound)] == findings
