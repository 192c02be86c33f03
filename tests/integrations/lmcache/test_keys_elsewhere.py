"""Keys of copies that LMCache keeps: an erasure that the ledger knows is carried out again on keys that came back."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvcustody.clock import VirtualClock
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.erasure.tier_protocol import CompletedErasure, RemembersErasures
from kvcustody.governance.keys.locked_buffer import KeyBuffer
from kvcustody.governance.keys.root_key_wrapping import RootKeyWrapping
from kvcustody.governance.keys.shred_keys import ShredKeys
from kvcustody.governance.tiers.copies.index import shred_name
from kvcustody.integrations.lmcache.keys_elsewhere import KeysElsewhere

ADA = Selector(tenant="acme", subject="ada")
START_US = 1_700_000_000_000_000


class Restored:
    """Keys that were erased, and put back with their receipts as they were before."""

    def __init__(self, folder: Path) -> None:
        self.clock = VirtualClock(utc_us=START_US)
        live, copy = folder / "live", folder / "copy"
        live.mkdir()
        with closing(self._open(live)) as keys:
            for name in ("ada", None, "ben"):
                keys.of_subject(shred_name("acme", name), "acme")
        shutil.copytree(live, copy)
        with closing(self._open(live)) as keys:
            KeysElsewhere("nvme", keys).erase("e-1", ADA, self.clock.now_us())
            assert len(keys.living()) == 1
        shutil.rmtree(live)
        shutil.copytree(copy, live)
        self.keys = self._open(live)
        self.tier = KeysElsewhere("nvme", self.keys)

    def _open(self, folder: Path) -> ShredKeys:
        root = KeyBuffer()
        root.take(b"root".ljust(32, b"k"))
        return ShredKeys.open(folder / "shred.keys", RootKeyWrapping(root), self.clock)

    def is_living(self, subject: str | None) -> bool:
        return self.keys.find_subject(shred_name("acme", subject)) is not None


@pytest.fixture
def restored(tmp_path: Path) -> Iterator[Restored]:
    made = Restored(tmp_path)
    yield made
    made.keys.close()


def test_what_the_ledger_knows_as_erased_is_destroyed_again(restored: Restored) -> None:
    """Control: before anybody asks the ledger they are there, and another subject's stays."""
    assert isinstance(restored.tier, RemembersErasures)
    assert restored.tier.returned_keys == 0  # the receipts went back too
    assert restored.is_living("ada") and restored.is_living(None)
    assert restored.tier.erase_returned(CompletedErasure("e-1", ADA, START_US + 1_000_000)) == 2
    assert not restored.is_living("ada") and not restored.is_living(None)
    assert restored.is_living("ben")


def test_keys_that_were_made_after_the_erasure_stay(restored: Restored) -> None:
    assert restored.tier.erase_returned(CompletedErasure("e-1", ADA, START_US - 1)) == 0
    assert restored.is_living("ada")


def test_an_erasure_of_every_tenant_reaches_every_older_key(restored: Restored) -> None:
    assert restored.tier.erase_returned(CompletedErasure("e-2", Selector(), START_US + 1_000_000)) == 3


def test_an_erasure_of_a_tenant_reaches_its_subjects_and_no_other_tenants(restored: Restored) -> None:
    """A key that does not say whose it is may be the tenant's: it ends too."""
    keys = restored.keys
    keys.of_subject(shred_name("globex", "eve"), "globex")
    keys.of_subject(b"made before keys had tenants")
    assert restored.tier.erase("e-3", Selector(tenant="acme"), START_US).objects == 0
    assert not any(restored.is_living(subject) for subject in ("ada", "ben", None))
    assert keys.find_subject(shred_name("globex", "eve")) is not None
    assert keys.find_subject(b"made before keys had tenants") is None
