"""A request's latency class changes what is chosen for it, is on record with the choice, and is explained."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcustody.audit.kinds import TransferDecided
from kvcustody.console.tier.wording import lines_of
from kvcustody.errors import ConfigError
from kvcustody.governance.admission_outcome import Admission
from kvcustody.governance.request import Hints
from kvcustody.governance.tiers.tier_link import TierLink
from kvcustody.governance.tiers.transfer_rates import PROBE_US
from standins.governance.offload_world import MODEL, World, prompt, who

SIZE = 1 << 20


def measured(*took_us: int) -> TierLink:
    link = TierLink()
    for each in took_us:
        link.restored(SIZE, 4, each, asked=4)
    return link


@pytest.mark.parametrize(
    ("latency", "unknown", "narrow", "wide", "slower", "later"),
    [
        ("", "not measured yet", "faster", "faster", "slower", "slower"),
        ("batch", "not measured yet", "faster", "faster", "slower", "tried"),
        ("interactive", "untried", "uncertain", "faster", "slower", "slower"),
    ],
)
def test_a_class_changes_the_choice(
    latency: str, unknown: str, narrow: str, wide: str, slower: str, later: str
) -> None:
    """Narrow: faster by less than predictions were wrong; later: when a link that was slower may be looked at."""
    assert TierLink().choose_restore(SIZE, 1e6, 0, latency=latency).reason == unknown
    assert TierLink().choose_restore(SIZE, None, 0, latency=latency).moves is (latency != "interactive")
    link = measured(1000, 2000, 1000, 2000, 1000, 2000)
    takes_us, error = link.restores.predict(SIZE), link.restores.error
    assert takes_us is not None and error is not None and 0.2 < error < 1, "void: predictions are not wrong"
    for recompute_us, reason in ((takes_us * (1 + error / 2), narrow), (takes_us * 3, wide)):
        chosen = link.choose_restore(SIZE, recompute_us, 0, latency=latency)
        assert chosen.reason == reason and chosen.moves is (reason == "faster")
    assert link.choose_restore(SIZE, takes_us / 2, 0, latency=latency).reason == slower
    assert link.choose_restore(SIZE, takes_us / 2, 2 * PROBE_US, latency=latency).reason == later


def test_what_an_interactive_request_leaves_untried_is_looked_at_between_steps() -> None:
    link = TierLink()
    assert link.choose_restore(SIZE, 1e6, 0, latency="interactive").reason == "untried"
    assert not link.watch.due(PROBE_US - 1) and link.watch.due(PROBE_US)


def test_a_shared_store_is_asked_where_look_up_and_restore_are_faster_than_computing() -> None:
    assert TierLink().choose_look(SIZE, 1e6, 0) == "not measured yet"
    assert TierLink().choose_look(SIZE, 1e6, 0, "interactive") == "", "nothing is tried on it"
    link = measured(1000, 1000)
    takes_us = link.restores.predict(SIZE)
    assert takes_us is not None
    assert link.choose_look(SIZE, takes_us + 10, 0) == "faster", "control: no look-up has taken anything yet"
    link.looked(500)
    assert link.look_us == 500, "the first is all that is known"
    link.looked(600)
    assert 500 < link.look_us < 600
    assert link.choose_look(SIZE, takes_us + link.look_us - 1, 0) == ""
    assert link.choose_look(SIZE, takes_us + link.look_us + 1, 0) == "faster"
    assert link.watch.is_left_alone
    assert [link.choose_look(SIZE, takes_us, PROBE_US, one) for one in ("interactive", "", "")] == [
        "",
        "tried",
        "",
    ]
    assert link.choose_restore(SIZE, takes_us - 1, PROBE_US, is_tried=True).reason == "tried"


class Asked:
    """Requests of a class to a world whose tier was never restored from."""

    def __init__(self, folder: Path) -> None:
        self.world = World(folder, "host")
        offload = self.world.worker.governor.offload
        assert offload is not None
        self.offload, self.decided = offload, list[TransferDecided]()
        take = offload.transfers.take_decisions

        def taking() -> list[TransferDecided]:
            taken = take()
            self.decided += taken
            return taken

        offload.transfers.take_decisions = taking  # type: ignore[method-assign]

    def ask(self, latency: str, tokens: list[int]) -> int:
        governor = self.world.worker.governor
        admitted = governor.admit(who("acme"), MODEL, tokens, hints=Hints(latency=latency))
        assert isinstance(admitted, Admission)
        governor.release(admitted.request_id)
        governor.step()
        return admitted.hit_tokens


def test_it_is_on_record_with_the_choice_and_explained(tmp_path: Path) -> None:
    asked, mine = Asked(tmp_path), prompt(1, 10)
    asked.world.serve("acme", mine)
    asked.world.crowd()
    assert asked.ask("interactive", mine) == 0, "nothing is tried on it"
    assert asked.ask("batch", mine) == 160
    restores = [one for one in asked.decided if one.action == "restore"]
    assert [(one.latency_class, one.reason, one.choice) for one in restores] == [
        ("interactive", "untried", "recompute"),
        ("batch", "not measured yet", "transfer"),
    ]
    assert {one.latency_class for one in asked.decided if one.action == "store"} == {""}
    asked.world.worker.close()


def test_a_class_that_there_is_not_is_refused(tmp_path: Path) -> None:
    world = World(tmp_path, "host")
    with pytest.raises(ConfigError, match="hint `latency`"):
        world.worker.governor.admit(who("acme"), MODEL, prompt(1, 2), hints=Hints(latency="soon"))
    assert world.worker.governor.check() == []
    world.worker.close()


def test_an_explanation_says_the_class_and_what_it_changed() -> None:
    decision = {
        "action": "restore", "tier": "host", "blocks": 8, "bytes": SIZE, "transfer_us": 900, "recompute_us": 1000,
        "choice": "recompute", "outcome": "", "actual_us": 0, "reason": "uncertain", "part_blocks": 0,
        "latency_class": "interactive",
    }  # fmt: skip
    request = {
        "residency": 9, "tenant": "acme", "classification": "internal", "attached_blocks": 0, "written_blocks": 8,
        "decisions": [decision],
    }  # fmt: skip
    said = "\n".join(lines_of(request))
    assert "its latency class: interactive" in said
    assert "by less than predictions were wrong, and the request is interactive" in said
    assert "latency class" not in "\n".join(lines_of(request | {"decisions": [decision | {"latency_class": ""}]}))
