"""What the kit's target for LMCache is made of, without LMCache: its policy, its clock, transfers that are held."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcustody.clock import VirtualClock
from kvcustody.errors import ConfigError
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.testkit.conformance.policy import policy
from kvcustody.testkit.lmcache.deployment import sealed
from kvcustody.testkit.lmcache.server import ToldClock
from kvcustody.testkit.lmcache.transfers import HeldTransfers


class Done:
    """A transfer of LMCache's, over when it is asked for."""

    def __init__(self, value: str) -> None:
        self.value = value

    def query(self) -> bool:
        return True

    def result(self, timeout: float | None) -> str:
        return self.value


class Context:
    """Notes what was handed to LMCache, and when."""

    mode = "engine_driven"

    def __init__(self) -> None:
        self.log: list[str] = []

    def submit_store(self, request: str, key: str, *more: object) -> Done:
        self.log.append(f"store {request}")
        return Done(key)

    def submit_retrieve(
        self, request: str, key: str, caches: object, blocks: object, *, skip_first_n_tokens: int
    ) -> Done:
        self.log.append(f"load {request}, skip {skip_first_n_tokens}")
        return Done(key)


def test_nothing_that_is_held_has_begun_and_then_everything_does_in_order() -> None:
    context = Context()
    log = context.log
    held = HeldTransfers(
        context, lambda key: log.append(f"told {key}"), lambda request, blocks: log.append(f"writes {blocks}")
    )
    assert held.mode == "engine_driven"
    at_once = held.submit_store("a", "k1")
    assert at_once.query() and at_once.result() == "k1" and log == ["told k1", "store a"]
    log.clear()
    held.hold(True)
    store = held.submit_store("b", "k2", "caches")
    load = held.submit_retrieve("c", "k3", "caches", [[4, 5]], skip_first_n_tokens=8)
    assert not store.query() and not load.query() and log == ["told k2"]
    held.hold(False)
    assert log == ["told k2", "store b", "writes [4, 5]", "load c, skip 8"]
    assert store.query() and (store.result(), load.result()) == ("k2", "k3")
    held.submit_store("d", "k4")
    assert log[-1] == "store d", "nothing is held any more"


def test_another_process_reads_the_time_that_it_is_told(tmp_path: Path) -> None:
    clock, path = VirtualClock(), tmp_path / "clock"
    told = ToldClock(path, writes=True)
    theirs = ToldClock(path)
    for _ in range(2):
        clock.advance(61_000_000)
        assert theirs.now_us() != clock.now_us()
        told.tell(clock)
        assert (theirs.now_us(), theirs.utc_us()) == (clock.now_us(), clock.utc_us())


def test_no_copy_may_rest_in_clear() -> None:
    [before, _] = load_policy(policy(tier=True), name="kit.yaml").offload
    [after, never] = load_policy(sealed(policy(tier=True)), name="kit.yaml").offload
    assert before.tiers and not before.encrypt, "control"
    assert after.tiers and after.encrypt and not never.tiers
    with pytest.raises(ConfigError, match="encrypt: none"):
        sealed(policy())
