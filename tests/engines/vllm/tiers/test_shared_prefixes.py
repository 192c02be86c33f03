"""What a policy shares, in a running vLLM with a host tier: copies come back to whom they are for alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from standins.engines.vllm.local_engine import BLOCK, LocalEngine
from standins.engines.vllm.tier_engines import TIER_POLICY, deployment_with, displace, options, prompt, tier
from standins.waiting import until

SHARED = prompt(1, 8)[:-1]
NAMED = "".join(f"  {name}: {{quota: {{guaranteed: 0%, cap: 100%, borrow: true}}}}\n" for name in ("beta", "gamma"))
POLICY = TIER_POLICY.replace("  default: {quota", NAMED + "  default: {quota")
GRANTING = POLICY.replace("scope: subject", "scope: tenant")  # a grant opens no subject's domain
READERS = ("beta", "gamma")
HEAD = len(SHARED)


def test_a_segment_comes_back_to_whom_it_is_for_and_to_nobody_else(
    start: Callable[..., LocalEngine], plain: LocalEngine, tmp_path: Path
):
    """Controls: the same prompts of a tenant that no rule names, and of one that did when the segment is withdrawn."""
    engine = start(deployment=deployment_with(tmp_path / "site", POLICY), **options())
    engine.ask(prompt(99, 2), tenant="alpha")
    made = engine.probe("declare", ("api-keys", "alpha", SHARED))
    covered = made["blocks"] * BLOCK
    assert made["blocks"] == 7, "the last block may be tokenized otherwise"
    segment = (
        f"segments: [{{id: s, owner: alpha, tenants: [alpha, beta], digest: 'hmac:{made['digest']}', "
        f"tokens: {made['tokens']}, classification: internal, expires: 2099-01-01}}]\n"
    )
    engine.governance("activate", POLICY + segment, 2, "tests")
    before = tier(engine)["restored_blocks"]

    def ask(tenant: str, seed: int) -> tuple[int, int]:
        """Cached tokens, and blocks that came from the tier for them."""
        nonlocal before
        tokens = [*SHARED[:covered], *prompt(seed, 4)]
        answer = engine.ask(tokens, tenant=tenant, max_tokens=8)
        assert answer.tokens == plain.ask(tokens, max_tokens=8).tokens
        restored, before = tier(engine)["restored_blocks"] - before, tier(engine)["restored_blocks"]
        return answer.cached_tokens, restored

    ask("alpha", 5)
    ask("beta", 6)  # a first use is put on record, and computed
    assert ask("beta", 7) == (covered, 0), "from the device"
    displace(engine)
    assert ask("gamma", 8) == (0, 0), "no rule is for it"
    displace(engine)
    assert ask("beta", 9) == (covered, 7), "from the tier"
    displace(engine)
    assert ask("alpha", 5) == (11 * BLOCK, 11), "and what is its owner's own follows"
    displace(engine)
    assert ask("gamma", 8) == (11 * BLOCK, 11), "its own copy, that it computed itself"
    assert ask("beta", 9)[0] == 11 * BLOCK

    displace(engine)
    engine.governance("activate", POLICY, 3, "tests")
    assert ask("beta", 10) == (4 * BLOCK, 4), (
        "withdrawn: one object of its own first use, before the policy was on record"
    )
    engine.governance("activate", POLICY + segment, 4, "tests")
    ask("beta", 11)
    displace(engine)
    engine.governance("erase", "alpha", None, None)
    assert ask("beta", 12)[1] in (0, 4), "its owner's data was erased, in every tier; its own was not"
    assert until(lambda: not any(engine.probe("pool")["refs"][1:]))
    assert engine.governance("check") == []
    assert engine.governance("scan") == []


class Granted:
    """An engine under which `beta` and `gamma` read what `alpha` has in its tenant's domain, while `open`."""

    def __init__(self, engine: LocalEngine, plain: LocalEngine) -> None:
        self.engine, self.plain, self._revision = engine, plain, 1
        self.open()

    def open(self) -> None:
        """The grants stand, each under an id that was never used."""
        revision, until_when = self._revision + 1, "at_most: internal, until: 2099-01-01, reason: t"
        grants = [f"{{id: {one}-{revision}, owner: alpha, reader: {one}, {until_when}}}" for one in READERS]
        self._activate(f"{GRANTING}grants: [{', '.join(grants)}]\n")
        for tenant in ("alpha", *READERS):
            self.ask(tenant, prompt(200 + revision, 2))  # a first use is put on record, and computed

    def withdraw(self) -> None:
        """They do not any more."""
        self._activate(GRANTING)

    def _activate(self, policy: str) -> None:
        self._revision += 1
        self.engine.governance("activate", policy, self._revision, "tests")

    def ask(self, tenant: str, tokens: list[int]) -> tuple[int, int]:
        """Cached tokens, and blocks that came from the tier for them; the answer is the plain engine's."""
        before = tier(self.engine)["restored_blocks"]
        answer = self.engine.ask(tokens, tenant=tenant, max_tokens=8)
        assert answer.tokens == self.plain.ask(tokens, max_tokens=8).tokens
        return answer.cached_tokens, tier(self.engine)["restored_blocks"] - before

    def theirs(self, tenant: str) -> int:
        """Blocks in copies of a tenant's."""
        return int(self.engine.probe("tier_copies", "host").get(tenant, 0))

    def bring(self, head: list[int]) -> None:
        """Nothing but the owner's blocks of this beginning is on the device."""
        displace(self.engine)
        assert self.ask("alpha", [*head, 17])[0] == len(head)

    def settle(self) -> None:
        """Nothing is held, and all books agree."""
        assert until(lambda: not any(self.engine.probe("pool")["refs"][1:]))
        assert until(lambda: self.engine.free_residue() == 0)
        assert self.engine.governance("check") == [] == self.engine.governance("scan")


@pytest.fixture(scope="module")
def granted(
    engines: Callable[..., LocalEngine], plain: LocalEngine, tmp_path_factory: pytest.TempPathFactory
) -> Granted:
    deployment = deployment_with(tmp_path_factory.mktemp("granted"), GRANTING)
    return Granted(engines(deployment=deployment, **options()), plain)


def test_what_a_grant_s_reader_computed_behind_it_comes_back_to_it_alone(granted: Granted):
    """Controls: another reader of the same blocks, the grant when it is withdrawn, and its owner's data when erased."""
    mine, other = [*SHARED, *prompt(5, 4)], [*SHARED, *prompt(6, 4)]
    granted.ask("alpha", [*SHARED, 17])
    kept = granted.theirs("beta")
    assert granted.ask("beta", mine) == granted.ask("beta", other) == (HEAD, 0), "void: nothing is granted"
    assert until(lambda: granted.theirs("beta") == kept + 8), "what it computed, and nothing of its owner's"
    granted.bring(SHARED)
    assert granted.ask("gamma", mine) == (HEAD, 0), "its keys are its own"
    granted.bring(SHARED)
    assert granted.ask("beta", mine) == (HEAD + 4 * BLOCK, 4), "its own, behind its owner's blocks"

    granted.bring(SHARED)
    granted.withdraw()
    assert granted.ask("beta", other) == (0, 0), "its path went through what it may not read"
    granted.open()
    displace(granted.engine)
    granted.engine.governance("erase", "alpha", None, None)
    assert granted.ask("beta", mine) == (HEAD, 8), "its own copy of the beginning, and nothing behind its owner's"
    granted.settle()


@pytest.mark.parametrize("when", ["before", "in flight"])
def test_a_grant_that_is_withdrawn_around_a_load_behind_it(granted: Granted, when: str):
    engine, head = granted.engine, prompt(30 + len(when), 8)[:-1]
    mine = [*head, *prompt(7, 4)]
    granted.open()
    granted.ask("alpha", [*head, 17])
    assert granted.ask("beta", mine) == (HEAD, 0), "void: nothing is granted"
    granted.bring(head)
    expected = granted.plain.ask(mine, max_tokens=24).tokens
    engine.rpc("tier_fault", "host", "slow", 0.3)
    try:
        if when == "before":
            granted.withdraw()
        asked = engine.submit(mine, tenant="beta", max_tokens=24)
        time.sleep(0.15)
        if when == "in flight":
            granted.withdraw()
        answer = engine.finish()[asked]
    finally:
        engine.rpc("tier_fault", "host", "none")
    assert answer.tokens == expected
    assert answer.cached_tokens == (0 if when == "before" else HEAD + 4 * BLOCK), "who has begun goes on"
    displace(engine)
    if when == "in flight":
        assert granted.ask("beta", mine) == (0, 0), "and nobody finds that path any more"
    granted.settle()
