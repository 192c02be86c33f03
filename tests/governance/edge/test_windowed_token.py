"""Windowed tokens: one text for a scope and a window, and every other one refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvcustody.clock import VirtualClock
from kvcustody.errors import ConfigError, IdentityError
from kvcustody.governance.credentials.scope_token import Rejected, VerifiedToken
from kvcustody.governance.credentials.scope_token_bytes import decoded, encoded
from kvcustody.governance.edge.erase_epochs import Epochs
from kvcustody.governance.edge.windowed_token import (
    PREFIX,
    WindowedClaims,
    WindowedTokenIssuer,
    WindowedTokens,
)
from kvcustody.governance.identity.principal import Principal
from kvcustody.governance.settings import Settings
from kvcustody.integrations.identity.from_settings import open_windowed
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.times import SECOND_US
from standins.builders import policy
from standins.integrations.door_world import Signers, make_signers
from standins.integrations.fleet_edge import FleetEdge, door_key

WINDOW = 3600
ANN = Principal("corp", "acme", "ann", "chat", route="/v1/completions")
CLAIMS = WindowedClaims(ANN, None, "f" * 32, "default", Epochs(1, 2, 3))


class World:
    def __init__(self, **more: Any) -> None:
        self.clock = VirtualClock()
        self.clock.advance(WINDOW * SECOND_US - self.clock.utc_us() % (WINDOW * SECOND_US))  # a window begins
        self.keys = [door_key().verifier]
        self.issuer = WindowedTokenIssuer(door_key, self.clock, window_seconds=WINDOW)
        self.tokens = WindowedTokens(lambda: self.keys, self.clock, **{"window_seconds": WINDOW, **more})

    def verify(self, text: str) -> str:
        """Why a token is refused; empty where it is not."""
        found = self.tokens.verify(text)
        return found.reason if isinstance(found, Rejected) else ""


def test_equal_claims_give_one_text_in_a_window_and_any_other_claim_another() -> None:
    world = World()
    text = world.issuer.issue(CLAIMS)
    world.clock.advance((WINDOW - 1) * SECOND_US)
    assert world.issuer.issue(CLAIMS) == text
    others = [
        CLAIMS._replace(principal=Principal("corp", "acme", "bob", "chat", route="/v1/completions")),
        CLAIMS._replace(hint="secret"),
        CLAIMS._replace(namespace="e" * 32),
        CLAIMS._replace(group="g2"),
        CLAIMS._replace(epochs=Epochs(1, 2, 4)),
    ]
    texts = {world.issuer.issue(each) for each in others} | {world.issuer.issue(CLAIMS, salt=b"s" * 12)}
    assert len(texts | {text}) == 7
    world.clock.advance(SECOND_US)
    assert world.issuer.issue(CLAIMS) != text, "the next window"


def test_who_it_is_and_what_it_stood_on() -> None:
    world = World()
    found = world.tokens.verify(world.issuer.issue(CLAIMS._replace(hint="secret"), salt=b"s" * 12))
    assert isinstance(found, VerifiedToken) and found.principal == ANN
    assert (found.hints.classification, found.hints.epochs) == ("secret", Epochs(1, 2, 3))
    assert found.hints.salt is not None


@pytest.mark.parametrize(("windows", "why"), [(0, ""), (1, ""), (2, "expired"), (3, "expired")])
def test_the_running_and_the_last_window_are_accepted(windows: int, why: str) -> None:
    world = World()
    text = world.issuer.issue(CLAIMS)
    world.clock.advance(windows * WINDOW * SECOND_US)
    assert [world.verify(text) for _ in range(3)] == [why] * 3


def test_a_clock_that_is_set_back_revives_none_and_a_door_may_be_a_little_ahead() -> None:
    world = World()
    text = world.issuer.issue(CLAIMS)
    world.clock.advance(2 * WINDOW * SECOND_US)
    assert world.verify(text) == "expired"
    world.clock.step_utc(-2 * WINDOW * SECOND_US)
    assert world.verify(text) == "expired"
    ahead = World()
    early = ahead.issuer.issue(CLAIMS)
    ahead.clock.step_utc(-4 * SECOND_US)
    assert ahead.verify(early) == ""
    ahead.clock.step_utc(-4 * SECOND_US)
    fresh = WindowedTokens(lambda: ahead.keys, ahead.clock, window_seconds=WINDOW)
    assert fresh.verify(early) == Rejected("future-dated")


def test_every_changed_byte_is_refused() -> None:
    world = World()
    text = world.issuer.issue(CLAIMS)
    data = decoded(text.removeprefix(PREFIX))
    assert data is not None and world.verify(text) == "", "the control"
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1
        assert world.verify(PREFIX + encoded(bytes(changed)))
    for cut in ("", PREFIX, text[:-1], text + "A", text.removeprefix(PREFIX), "kvd1." + text[5:]):
        assert world.verify(cut)


def test_other_keys_groups_and_windows_are_refused() -> None:
    world = World()
    text = world.issuer.issue(CLAIMS)
    assert World(group="g2").verify(text) == "other-group"
    assert World(window_seconds=60).verify(text) == "expired", "the window's length is the worker's"
    world.keys[:] = [door_key(2).verifier]
    assert world.verify(text) == "other-key"

    def unreadable() -> Any:
        raise IdentityError("credentials file: unreadable", reason="unreadable")

    assert WindowedTokens(unreadable, world.clock, window_seconds=WINDOW).verify(text) == Rejected("other-key")
    for seconds in (0, 59, 86_401):
        with pytest.raises(ConfigError):
            WindowedTokens(lambda: world.keys, world.clock, window_seconds=seconds)


@pytest.fixture(scope="module")
def signers() -> Signers:
    return make_signers()


def test_a_door_writes_it_in_place_of_the_namespace(tmp_path: Path, signers: Signers) -> None:
    fleet = FleetEdge(tmp_path, signers, window_seconds=WINDOW)
    tokens = WindowedTokens(lambda: [fleet.key.verifier], fleet.clock, window_seconds=WINDOW)
    first, again = (fleet.send(fleet.clients.alice).json["cache_salt"] for _ in range(2))
    other = fleet.send(fleet.clients.acme, headers={"x-kvcustody-subject": "bob"}).json["cache_salt"]
    salted = fleet.send(fleet.clients.alice, {"prompt": "p", "cache_salt": "mine"}).json["cache_salt"]
    assert first == again and len({first, other, salted}) == 3
    found = tokens.verify(first)
    assert isinstance(found, VerifiedToken)
    assert (found.principal.tenant, found.principal.subject) == ("acme", "alice")
    narrowed = tokens.verify(salted)
    assert isinstance(narrowed, VerifiedToken) and narrowed.hints.salt is not None


def test_a_worker_says_where_windows_end_before_idle_blocks_do(tmp_path: Path) -> None:
    (tmp_path / "doors.vkeys").write_text(f"{door_key().verifier}\n")
    identity = tmp_path / "identity.yaml"
    identity.write_text("schema: kvcustody/identity@1\ndoors: {keys: doors.vkeys}\n")
    an_hour = load_policy(policy(), name="p.yaml")
    for seconds, warnings in ((0, 0), (3600, 0), (3599, 1)):
        with capture_logs() as told:
            opened = open_windowed(
                Settings(identity_path=identity, windowed_token_seconds=seconds), VirtualClock(), an_hour
            )
        assert (opened is None) is (seconds == 0) and len(told) == warnings
    identity.write_text("schema: kvcustody/identity@1\napi_keys: {path: keys.yaml}\n")
    with pytest.raises(ConfigError, match="doors"):
        open_windowed(Settings(identity_path=identity, windowed_token_seconds=3600), VirtualClock(), an_hour)
