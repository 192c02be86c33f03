"""A12: weights, adapter, template, labels and key epochs change under load; nothing of before is hit afterwards."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from kvcustody.governance.admission_outcome import Admission
from kvcustody.governance.governor.governor import Governor
from kvcustody.governance.identity import model_identity
from kvcustody.governance.identity.domain_spec import tenant_owner
from standins.redteam.two_worlds import BLOCK, ISSUER, World, model, table, tokens

KINDS = ("weights", "adapter", "template", "key")
TENANTS = ("acme", "globex")


class _Served:
    """A deployment under load. `epoch` counts every change; each block remembers the epoch it was written under."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.world = World(table(), blocks=4096)
        self.versions: Counter[str] = Counter()
        self.epoch = 0
        self.written: dict[tuple[int, int], int] = {}
        self.running: list[tuple[Admission, int, int]] = []
        self.requests = self.hits = self.stale = self.mixed = 0
        self.changes: Counter[str] = Counter()

    def model(self) -> model_identity.ModelIdentity:
        """What is loaded now. A reload keeps the digest: only the load epoch tells."""
        return model(
            weights_epoch=1 + self.versions["weights"],
            adapter_digest="sha256:a",
            adapter_epoch=1 + self.versions["adapter"],
            chat_template=f"template-{self.versions['template']}",
        )

    def change(self, kind: str) -> None:
        """One hot swap, with requests in flight."""
        self.epoch += 1
        self.changes[kind] += 1
        self.versions[kind] += 1
        if kind == "key":
            for tenant in TENANTS:
                self.world.keyring.rotate(tenant_owner(ISSUER, tenant))
            self.world.governor.reload_keys()

    def request(self) -> None:
        """Admit one, look at what it was given, and leave it running."""
        manager = self.world.governor.managers[0]
        tenant = self.random.choice(TENANTS)
        prompt = tokens(Random(self.random.randrange(12)), 4 * BLOCK + 3)
        answer = self.world.admit(tenant, prompt, model=self.model())
        assert isinstance(answer, Admission), answer
        blocks = answer.blocks.tolist()
        generations = manager.pool.generation[answer.blocks].tolist()
        self.requests += 1
        hit = answer.hit_tokens // BLOCK
        self.hits += hit > 0
        epochs = {self.written[key] for key in zip(blocks[:hit], generations[:hit], strict=True)}
        self.stale += bool(epochs - {self.epoch})
        self.mixed += len(epochs) > 1
        for key in zip(blocks[hit:], generations[hit:], strict=True):
            self.written[key] = self.epoch
        self.running.append((answer, len(prompt), self.epoch))

    def finish_some(self) -> None:
        """End some of the oldest; a sequence that decodes across a swap writes under the epoch it began in."""
        governor = self.world.governor
        while len(self.running) > self.random.randrange(2, 12):
            answer, count, epoch = self.running.pop(0)
            governor.commit([answer.request_id], [count])
            for token in range(self.random.randrange(20)):
                governor.extend_many([answer.request_id], [token])
            blocks = governor.blocks(answer.request_id)
            generations = governor.managers[0].pool.generation[blocks]
            for key in zip(blocks.tolist(), generations.tolist(), strict=True):
                self.written.setdefault(key, epoch)
            governor.release(answer.request_id)


def _serve(requests: int, seed: int, kinds: tuple[str, ...] = KINDS) -> _Served:
    served = _Served(seed)
    for at in range(requests):
        served.request()
        served.finish_some()
        if served.random.random() < 0.02:
            served.change(served.random.choice(kinds))
        if at % 8 == 0:
            served.world.step()
    assert not served.world.governor.check(), f"seed {seed}"
    return served


def _check(requests: int) -> None:
    served = _serve(requests, 12, KINDS)
    assert served.hits > requests // 3 and min(served.changes[kind] for kind in KINDS) > 0, "void: no load"
    assert (served.stale, served.mixed) == (0, 0)


def test_no_hit_from_before_a_hot_swap() -> None:
    """A12, small: 1,000 requests, about 20 swaps of weights, adapter, template and key epoch."""
    _check(1_000)


@pytest.mark.soak
def test_hot_swaps_at_full_size() -> None:
    """A12, full: 10^5 requests, about 2,000 swaps."""
    _check(100_000)


def _without(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "key":
        monkeypatch.setattr(Governor, "reload_keys", lambda self: None)
        monkeypatch.setattr("kvcustody.governance.keys.keyring.Keyring.rotate", lambda self, owner: None)
        return
    field = {"weights": "weights_epoch", "adapter": "adapter_epoch", "template": "chat_template"}[kind]
    names = [name for name in model_identity.ModelIdentity.__dataclass_fields__ if name != "digest"]
    fields_of = model_identity.ModelIdentity.encoded_fields
    monkeypatch.setattr(
        model_identity.ModelIdentity,
        "encoded_fields",
        lambda self: {at: value for at, value in fields_of(self).items() if at != names.index(field) + 1},
    )


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_epoch_what_was_before_is_hit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A12's control, for each kind of swap."""
    _without(kind, monkeypatch)
    assert _serve(400, 12, (kind,)).stale >= 1, "void: without the epoch a stale hit must show"


def _activated(first: Any, second: Any) -> tuple[int, int]:
    """Hit tokens of a prompt before and after `second` becomes the active revision."""
    world = World(first)
    prompt = tokens(Random(1), 4 * BLOCK + 3)
    world.hit("acme", prompt)
    before = world.hit("acme", prompt)
    world.governor.activate(second, actor="test")
    return before, world.hit("acme", prompt)


REVISIONS = {
    "labels": {"classify": '  - {tenant: "*", labels: {region: us}}'},
    "forbidden": {"rules": "  - {id: nothing, effect: forbid, action: reuse}"},
}


@pytest.mark.parametrize("what", REVISIONS)
def test_a_revision_that_changes_the_domain_reaches_nothing_of_before(what: str) -> None:
    """A12 by policy: new labels, or a rule that forbids reuse, hold from the next request on."""
    before, after = _activated(table(), table(revision=2, **REVISIONS[what]))
    assert before == 4 * BLOCK and after == 0
    assert _activated(table(), table(revision=2)) == (before, before), "void: an equal policy must keep its hits"


def _outlived(after: dict[str, Any], wait_us: int) -> tuple[int, int]:
    """Hit tokens, and blocks still CACHED, once `wait_us` has passed under a narrower revision."""
    world = World(table(idle="30m"))
    prompt = tokens(Random(1), 4 * BLOCK + 3)
    for at in range(5):
        world.hit("acme", prompt, subject=f"s{at}")
    running = world.admit("acme", prompt)
    world.governor.activate(table(revision=2, **after), actor="test")
    world.ask("acme", prompt)
    world.governor.release(running.request_id)
    world.clock.advance(wait_us)
    hit = world.admit("acme", prompt)
    world.governor.abort(hit.request_id)
    for _ in range(3):
        world.step(20_000)
    assert not world.governor.check() and not world.governor.scan()
    return hit.hit_tokens, world.governor.stats().pools[0].by_state["cached"]


NARROWER = {
    "shorter": ({"idle": "1m"}, 61_000_000),
    "never": ({"rules": "  - {id: keep-nothing, effect: forbid, action: retain}"}, 0),
    "unlisted": ({"tenants": "  victim: {quota: {guaranteed: 0%, cap: 100%, borrow: true}}"}, 0),
}


@pytest.mark.parametrize("what", ["shorter", "never"])
def test_a_narrower_revision_binds_what_is_cached(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A12 by policy: shorter retention, or none, is not outlived by what was cached before, swept or not."""
    assert _outlived(*NARROWER[what]) == (0, 0)
    monkeypatch.setattr("kvcustody.governance.custody.custody.apply_limits", lambda *facts, **options: [])
    assert _outlived(*NARROWER[what]) != (0, 0), "void: unbound, what was cached must live on"


def test_a_tenant_that_is_no_longer_listed_keeps_nothing() -> None:
    """A12 by policy: its blocks lapse at once, though nobody asks for them any more."""
    world = World(table())
    world.ask("acme", tokens(Random(1), 4 * BLOCK + 3))
    world.governor.activate(table(revision=2, **NARROWER["unlisted"][0]), actor="test")
    for _ in range(3):
        world.step(20_000)
    assert world.governor.stats().pools[0].by_state["cached"] == 0 and not world.governor.check()


def test_a_readers_plan_does_not_widen_the_owners_limits() -> None:
    """A12 by policy: where the owner may retain nothing, a reader that comes first through a grant changes nothing."""
    sharing = "grants:\n  - {id: g, owner: victim, reader: attacker, at_most: high, until: 2027-01-01, reason: test}"
    rules = "  - {id: keep-nothing, effect: forbid, action: retain, when: {owner: victim}}"
    world = World(table(sharing=sharing, rules=rules))
    prompt = tokens(Random(1), 4 * BLOCK + 3)
    world.ask("attacker", tokens(Random(2), 4 * BLOCK + 3))
    world.ask("victim", prompt)
    assert world.hit("victim", prompt) == 0


def _primed_after_destruction() -> int:
    """Plans under a destroyed epoch that still hold a primed state: in the book, in requests and in residencies."""
    world = World(table())
    for n in range(20):
        world.ask("acme", tokens(Random(n), BLOCK + 1), subject=f"s{n}")
    world.admit("acme", tokens(Random(99), BLOCK + 1))
    owner = tenant_owner(ISSUER, "acme")
    world.keyring.rotate(owner)
    world.keyring.destroy(owner, 1)
    world.governor.reload_keys()
    manager = world.governor.managers[0]
    held = [r.facts for r in manager.hold_table.of(manager.accounts["acme"])]
    held += [sequence.residency.facts for sequence in world.governor.running.values()]
    assert len(held) >= 20
    return sum(plan.own.state is not None for plan in held)  # type: ignore[attr-defined]


def test_a_destroyed_epoch_leaves_no_primed_state_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A12, E5: what outlives the destruction names its holder and keys nothing."""
    assert _primed_after_destruction() == 0
    monkeypatch.setattr("kvcustody.governance.decisions.access_plan.Plan.forget_keys", lambda self: None)
    assert _primed_after_destruction() >= 20, "void: a plan that is kept must keep its state otherwise"
