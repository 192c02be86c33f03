"""One process's sealed tier on keys that it shares with others. It is driven line by line, and may be killed at any
moment.

    python key_victim.py KEYS TIER SEED       # reads `[number, act, …]` as JSON, answers `[number, value]`

Acts:

- `keep` and `bring` a prompt of a subject under an epoch;
- `rotate` and `destroy` an epoch;
- `erase` a subject;
- `follow` what others did with the keys;
- `opens` tells whether an epoch's secret can be obtained at all.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from kvcustody.errors import KeyringError, SealError
from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.identity.domain_spec import tenant_owner
from kvcustody.governance.keys.locked_buffer import KeyBuffer
from standins.governance.sealed_objects import World
from standins.governance.tier_place import STEP, Place

CAPACITY = 1 << 30


class SharedPlace(Place):
    """A tier in a folder of its own on keys in another."""

    def __init__(self, keys: Path, folder: Path) -> None:
        self._keys = keys
        super().__init__(folder, "nvme", CAPACITY)

    def open(self) -> None:
        self.world = World(self._keys)
        super().open()

    def under(self, tenant: str, subject: str, epoch: int) -> DomainLabel:
        """The subject's label under one of the tenant's epochs."""
        label = self.label(tenant, subject)
        assert label.spec is not None
        return dataclasses.replace(label, spec=dataclasses.replace(label.spec, key_epoch=epoch))


class Victim:
    """Does what it is told."""

    def __init__(self, place: SharedPlace) -> None:
        self.place = place
        self.ring = place.world.keyring

    def keep(self, tenant: str, subject: str, epoch: int, prompt: str) -> int:
        return self.place.keep(self.place.under(tenant, subject, epoch), prompt, STEP)

    def bring(self, tenant: str, subject: str, epoch: int, prompt: str) -> int:
        try:
            return self.place.bring(self.place.under(tenant, subject, epoch), prompt, STEP)
        except (KeyringError, SealError):
            return 0

    def rotate(self, tenant: str) -> int:
        return self.ring.rotate(tenant_owner("idp", tenant)).epoch

    def destroy(self, tenant: str, epoch: int) -> int:
        owner = tenant_owner("idp", tenant)
        self.ring.refresh()
        if epoch in self.ring.epochs(owner):
            self.ring.destroy(owner, epoch)
        return self.follow()

    def erase(self, tenant: str, subject: str, erasure: str) -> int:
        self.place.tier.erase(erasure, Selector(tenant, subject), self.place.world.clock.now_us())
        return 0

    def follow(self) -> int:
        self.ring.refresh()
        self.place.tier.narrow()
        self.place.tier.take_events()
        return 0

    def opens(self, tenant: str, epoch: int) -> bool:
        with KeyBuffer() as key:
            try:
                self.ring.derive(tenant_owner("idp", tenant), epoch, b"use", key)
            except KeyringError:
                return False
        return True


def main() -> None:
    keys, folder = map(Path, sys.argv[1:3])
    victim = Victim(SharedPlace(keys, folder))
    print(json.dumps([-1, "ready"]), flush=True)
    for line in sys.stdin:
        given: list[Any] = json.loads(line)
        number, act, *what = given
        print(json.dumps([number, getattr(victim, act)(*what)]), flush=True)


if __name__ == "__main__":
    main()
