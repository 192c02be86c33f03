"""A copy whose time ends while it is read is a miss: time is looked at again after every wait, before an attach."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcustody.governance.admission_outcome import Admission
from kvcustody.governance.tiers import tier as tier_module
from kvcustody.governance.tiers.tier import Restored, SealedTier
from standins.governance.offload_world import MODEL, POLICY, TOKENS, World, prompt, who

MINUTE_US = 60_000_000
SHORT = "internal: {idle: 10m, absolute: 10m, active_max: 1h}"
LIMITS = {
    "idle": POLICY,
    "ceiling": POLICY.replace("internal: {idle: 10m, absolute: 1h, active_max: 1h}", SHORT),
}
KEPT = prompt(1, 12)


def late_hit(
    folder: Path, kind: str, limit: str, monkeypatch: pytest.MonkeyPatch, *, waits: str, seconds: int
) -> tuple[int, int]:
    """Tokens that come from a tier two seconds before the copy is due, where its read takes so long; objects read."""
    monkeypatch.setattr("standins.governance.offload_world.POLICY", LIMITS[limit])
    world = World(folder, kind)
    world.serve("acme", KEPT)
    world.crowd()
    tier, governor = world.tiers[0], world.worker.governor
    world.clock.advance(10 * MINUTE_US - 2_000_000)
    governor.step()
    read: list[bool] = []

    def slow(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            answer = real(*args, **named)
            if not read:
                world.clock.advance(seconds * 1_000_000)
            read.append(True)
            return answer

        return call

    place = tier if waits == "after the write" else tier._index.store
    name = "_load_object" if waits == "after the write" else "prepare_load"
    monkeypatch.setattr(place, name, slow(getattr(place, name)))
    admitted = governor.admit(who("acme"), MODEL, KEPT)
    assert isinstance(admitted, Admission)
    governor.commit([admitted.request_id], [len(KEPT)])
    governor.release(admitted.request_id)
    governor.step()
    assert governor.check() == []
    world.worker.close()
    return admitted.hit_tokens, len(read)


@pytest.mark.parametrize(
    ("kind", "limit", "waits"),
    [
        ("host", "idle", "after the write"),
        ("host", "ceiling", "before the write"),
        ("nvme", "idle", "before the write"),
        ("nvme", "ceiling", "after the write"),
    ],
)
def test_what_is_due_when_it_has_arrived_is_a_miss(
    tmp_path: Path, kind: str, limit: str, waits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hit, read = late_hit(tmp_path, kind, limit, monkeypatch, waits=waits, seconds=3)
    assert (hit, read) == (0, 1)


def test_what_arrives_in_time_is_attached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hit, read = late_hit(tmp_path, "nvme", "ceiling", monkeypatch, waits="after the write", seconds=1)
    assert (hit, read) == (12 * TOKENS, 3)


def test_positive_control_a_load_that_does_not_look_at_the_time_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_of(restored: list[Restored], now_us: int) -> list[Restored]:
        return list(restored)

    monkeypatch.setattr(tier_module, "in_time", all_of)
    hit, _ = late_hit(tmp_path, "host", "ceiling", monkeypatch, waits="after the write", seconds=3)
    assert hit == 4 * TOKENS, "one object is attached past its ceiling"


def test_what_came_first_is_late_when_the_last_has_arrived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each object is in time by itself; the load is as late as its last one."""
    world = World(tmp_path, "host")
    world.serve("acme", KEPT[: 4 * TOKENS + 1])
    world.clock.advance(MINUTE_US)
    world.serve("acme", KEPT)
    world.crowd()
    tier: SealedTier = world.tiers[0]
    rows = [row for _, row in tier._index.rows.names()]
    dues = sorted({tier._index.rows.value("due_us", row) for row in rows})
    first = next(row for row in rows if tier._index.rows.value("depth", row) == 0)
    tier._index.rows.shorten(first, dues[0] - 30_000_000)
    real, waited = tier._load_object, list[int]()

    def slow(*args: Any) -> bool:
        came = real(*args)
        waited.append(1)
        if len(waited) == 2:
            world.clock.advance(tier._index.rows.value("due_us", first) - tier._index.clock.now_us() + 1)
        return came

    monkeypatch.setattr(tier, "_load_object", slow)
    admitted = world.worker.governor.admit(who("acme"), MODEL, KEPT)
    assert isinstance(admitted, Admission)
    assert (admitted.hit_tokens, len(waited)) == (0, 3)
    world.worker.close()
