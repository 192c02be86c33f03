"""Copies that a dead worker left in a shared store: the heir that settings name has them, and nobody else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvcustody.errors import StoreError
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.tiers.heirs import ENDED, RESTORED, TierHolder
from kvcustody.governance.tiers.stores import remote_store
from standins.governance.store_servers import MOST, StoreServer
from standins.governance.tier_place import Place

Made = Callable[..., Place]


class Process(Place):
    """One of a worker; `die` leaves what a killed one leaves."""

    def bring(self, *of: Any, **how: Any) -> int:
        self.world.keyring.refresh()
        return super().bring(*of, **how)

    def die(self) -> None:
        self.store.close()

    def inherited(self) -> list[tuple[str, str, str]]:
        """Who left each copy that was passed on, in which process, and what became of it."""
        told = [one for one in self.events() if one.step == "inherited"]
        return [(one.heir_of.worker, one.heir_of.incarnation, one.cause) for one in told]


@pytest.fixture(params=MOST)
def process(request: pytest.FixtureRequest, tmp_path: Path, server: Callable[[str], StoreServer]) -> Iterator[Made]:
    """`process(worker, heir_of=…)`: the next of this worker, on the same keys and store."""
    there, places, number = server(request.param), list[Place](), count(1)

    def of(worker: str, *heir_of: str, restores: bool = True) -> Place:
        class Made(Process):
            def limit(self, tenant: str, classification: str) -> Any:
                return super().limit(tenant, classification)._replace(restores=restores)

        holder = TierHolder(worker, "default", f"{worker}-{next(number)}")
        said = {"server": there, "worker": worker, "prefix": tmp_path.name, "heir_of": heir_of}
        places.append(Made(tmp_path, "remote", holder=holder, **said))
        return places[-1]

    yield of
    for place in places:
        place.staging.close()
        place.world.close()


def kept_and_died(process: Made, worker: str = "a") -> Any:
    """The label of two copies that a worker left which was killed."""
    dead = process(worker)
    acme = dead.label("acme")
    assert dead.keep(acme, "p", 8) == 8
    dead.die()  # type: ignore[attr-defined]
    return acme


def test_the_heir_that_is_named_has_custody_from_then_on(process: Made) -> None:
    """On record with whose they were, also behind a restart without the setting; an erasure leaves nothing of them."""
    acme = kept_and_died(process)
    heir = process("b", "a")
    assert heir.inherited() == [("a", "a-1", RESTORED)] * 2  # type: ignore[attr-defined]
    assert heir.tier.found_at_start == 2 == len(heir.tier.objects()) and heir.counted() == (2, 2)
    assert heir.bring(acme, "p", 8) == 8 and heir.orphans() == []
    heir.tier.close()
    again = process("b")
    assert (again.tier.found_at_start, again.inherited()) == (2, [])  # type: ignore[attr-defined]
    assert again.bring(acme, "p", 8) == 8
    assert again.tier.erase("e", Selector("acme"), 0).done
    assert again.counted() == (0, 0) and again.tier.counts.waiting == 0


def test_nobody_else_takes_them_over(process: Made) -> None:
    """Nor does a second heir; what is there is found by all as another's, and is the first heir's to end."""
    acme = kept_and_died(process)
    stranger = process("c")
    assert (stranger.tier.found_at_start, stranger.inherited()) == (0, [])  # type: ignore[attr-defined]
    assert stranger.bring(acme, "p", 8) == 8 and len(stranger.tier.objects()) == 0, "a hit, and no custody"
    heir, second = process("b", "a"), process("d", "a")
    assert (heir.tier.found_at_start, second.tier.found_at_start) == (2, 0)
    assert second.inherited() == [] and second.orphans() == []  # type: ignore[attr-defined]
    assert second.bring(acme, "p", 8) == 8
    heir.tier.end_tenant("acme")
    assert len(heir.tier.objects()) == 0 and second.bring(acme, "p", 8) == 0


def test_what_policy_does_not_let_it_restore_ends(process: Made) -> None:
    acme = kept_and_died(process)
    heir = process("b", "a", restores=False)
    assert heir.inherited() == [("a", "a-1", ENDED)] * 2  # type: ignore[attr-defined]
    assert heir.tier.found_at_start == 0 == len(heir.store.page(b"", 9)) and heir.bring(acme, "p", 8) == 0
    proofs = [one for one in heir.events() if one.step == "destroyed"]
    assert len(proofs) == 2 and heir.counted() == (0, 0)


def test_a_worker_that_stopped_in_order_has_no_heir(process: Made) -> None:
    first = process("a")
    acme = first.label("acme")
    assert first.keep(acme, "p", 8) == 8
    first.tier.close()
    heir = process("b", "a", "nobody")
    assert (heir.tier.found_at_start, heir.inherited()) == (0, [])  # type: ignore[attr-defined]
    again = process("a")
    assert again.tier.found_at_start == 2 and again.bring(acme, "p", 8) == 8, "its next process has them"


def test_who_comes_back_under_the_dead_ones_name_begins_anew(process: Made) -> None:
    """Neither ends the other's; when it dies again, the same heir has that too, and the heir's heir has all."""
    acme = kept_and_died(process)
    heir = process("b", "a")
    back = process("a")
    assert (back.tier.found_at_start, back.inherited()) == (0, [])  # type: ignore[attr-defined]
    assert back.bring(acme, "p", 8) == 8 and back.keep(acme, "q", 4) == 4
    for place in (heir, back):
        assert place.orphans(repair=True) == []
    assert heir.bring(acme, "p", 8) == 8 and heir.bring(acme, "q", 4) == 4
    back.die()  # type: ignore[attr-defined]
    heir.die()  # type: ignore[attr-defined]
    heir = process("b", "a")
    assert sorted(heir.inherited()) == [("a", "a-3", RESTORED), *[("b", "b-2", RESTORED)] * 2]  # type: ignore[attr-defined]
    heir.die()  # type: ignore[attr-defined]
    last = process("c", "b")
    assert last.inherited() == [("b", "b-4", RESTORED)] * 3 and last.tier.found_at_start == 3  # type: ignore[attr-defined]
    for worker in ("a", "b"):
        assert process(worker, "a").tier.found_at_start == 0
    assert last.bring(acme, "p", 8) == 8 and last.orphans() == []


@pytest.mark.parametrize("cut", ["the claim", "the listing"])
def test_a_store_that_fails_in_between_leaves_them_to_the_next_start(
    process: Made, monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    acme = kept_and_died(process)
    write, page = remote_store.RemoteStore._take, remote_store.RemoteStore.page

    def away(self: remote_store.RemoteStore, *of: object) -> Any:
        if not self._heir_of:
            return page(self, *of)  # type: ignore[arg-type]
        raise StoreError("away")

    with monkeypatch.context() as failing:
        if cut == "the claim":
            failing.setattr(remote_store.RemoteStore, "_take", away)
        else:
            failing.setattr(remote_store.RemoteStore, "page", away)
        first = process("b", "a")
        assert (first.tier.found_at_start, first.inherited()) == (0, [])  # type: ignore[attr-defined]
        first.die()  # type: ignore[attr-defined]
    assert remote_store.RemoteStore._take is write
    assert process("d", "a").tier.found_at_start == 0, "it is taken"
    heir = process("b", "a")
    assert heir.inherited() == [("a", "a-1", RESTORED)] * 2 and heir.bring(acme, "p", 8) == 8  # type: ignore[attr-defined]
