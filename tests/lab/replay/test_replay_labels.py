"""Labels and erasures are functions of a seed and names; the time line of sessions is too."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvcustody.errors import ConfigError
from kvcustody.lab.replay.traces.model import TraceRequest, empty_blocks
from kvcustody.lab.replay.traces.seeded_draws import draw, name_digest
from kvcustody.lab.replay.traces.timeline import stagger
from kvcustody.lab.replay.workload.labels import Labeller, load_weights, zipf_weights
from standins.console.erasure_schedule import erasure_schedule


def request(session: object, at_us: int = 0, lineage: object = 0, turn: int = 0) -> TraceRequest:
    return TraceRequest(at_us, 10, 1, empty_blocks(), session, lineage, "p", turn)


def test_draws_are_pinned_numbers() -> None:
    assert name_digest(1, "tenant", 7).hex() == "96a0b10d8137e6b3"
    assert draw(1, "tenant", 7) == int("96a0b10d8137e6b3", 16) / 2**64
    assert draw(1, "a", "b") != draw(1, "b", "a") != draw(2, "b", "a")
    assert draw(1, "x", 1) != draw(1, "x", "1")


def test_labels_do_not_depend_on_order() -> None:
    sessions = list(range(200))
    one, other = (Labeller(zipf_weights(8), tenants=8, seed=3) for _ in range(2))
    forward = {s: one.label(request(s)) for s in sessions}
    assert {s: other.label(request(s)) for s in reversed(sessions)} == forward


def test_tenants_follow_the_weights_heaviest_first() -> None:
    labeller = Labeller([1.0, 6.0, 3.0, 0.5], tenants=3, seed=1)
    counts = np.bincount([labeller.tenant(s) for s in range(20_000)], minlength=3) / 20_000
    assert counts == pytest.approx([0.6, 0.3, 0.1], abs=0.01)


@pytest.mark.parametrize("unit", ["session", "lineage", "project"])
def test_a_unit_belongs_to_one_tenant(unit: str) -> None:
    labeller = Labeller(zipf_weights(16), tenants=16, seed=1, unit=unit)
    labels = [labeller.label(request(s, lineage=s // 4)) for s in range(64)]
    per_lineage = {len({label.tenant for label in labels[i : i + 4]}) for i in range(0, 64, 4)}
    assert (per_lineage == {1}) == (unit != "session")
    assert len({label.tenant for label in labels}) == 1 or unit != "project"


def test_erasures_race_or_follow_their_subject() -> None:
    labeller = Labeller([1.0], tenants=1, seed=1)
    labelled = [
        (r, labeller.label(r)) for s in range(2000) for r in (request(s, s * 10), request(s, s * 10 + 5_000_000))
    ]
    schedule = erasure_schedule(labelled, seed=1, rate=0.2)
    assert len(schedule) == pytest.approx(400, rel=0.15)
    assert schedule == sorted(schedule)
    last = {label.subject: r.at_us for r, label in labelled}
    racing = sum(e.at_us < last[e.subject] for e in schedule) / len(schedule)
    assert racing == pytest.approx(0.3, abs=0.08)


def test_sessions_are_placed_by_their_own_draw() -> None:
    rows = [request(s, t, turn=t) for s in ("a", "b", "c") for t in (0, 1)]
    placed = stagger(rows, [0, 10, 20, 30], seed=1, stretch=8)
    starts = {r.session: r.at_us for r in placed if r.turn == 0}
    assert all(start % 80 == 0 for start in starts.values())
    assert [r.at_us for r in placed] == sorted(r.at_us for r in placed)
    again = stagger(rows[2:], [0, 10, 20, 30], seed=1, stretch=8)
    assert {r.session: r.at_us for r in again if r.turn == 0} == {s: t for s, t in starts.items() if s != "a"}
    assert len(stagger(rows, [0, 10, 20, 30], horizon_us=0)) < len(rows)


def test_weights_come_from_a_skew_file(tmp_path: Path) -> None:
    path = tmp_path / "skew.json"
    path.write_text(json.dumps({"models": {"m": [{"total": 2}, {"total": 1}]}}))
    assert load_weights(path, "m") == [2.0, 1.0]
    for text, model in (
        ("{", "m"),
        ("{}", "m"),
        (path.read_text(), "other"),
        ('{"models": {"m": [1]}}', "m"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"skew\.json"):
            load_weights(path, model)
        path.write_text(json.dumps({"models": {"m": [{"total": 2}]}}))
    with pytest.raises(ConfigError, match="cannot read weights"):
        load_weights(tmp_path / "absent")


@pytest.mark.parametrize(("weights", "tenants"), [([1.0], 2), ([1.0], 0), ([0.0], 1), ([1.0, -1.0], 2)])
def test_impossible_populations_are_refused(weights: list[float], tenants: int) -> None:
    with pytest.raises(ConfigError):
        Labeller(weights, tenants=tenants, seed=1)
