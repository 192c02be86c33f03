"""A10: keys made to collide. Look-up may then find a foreign block; attach must not.

No tokens are stored beside a block, so nothing compares content: what answers a collision is the width of a key inside
one domain (256 bits of a keyed hash: 2^-128 for any two of 2^64 blocks) and the domain compare across domains, which
does not rest on any hash. Keys of 16 bits in the last test show both halves of that sentence.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from kvcustody.allocator.pool.accounting import Domain
from kvcustody.allocator.prefix.node import Node
from kvcustody.allocator.prefix.tree import PrefixTree
from kvcustody.governance.keys.domain_key_cache import DomainKeys
from standins.redteam.two_worlds import BLOCK, World, table, tokens


class Narrow:
    """A hash state whose digests keep 16 bits."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self.update = state.update

    def digest(self) -> bytes:
        """16 bits of the digest, then zeros."""
        return self._state.digest()[:2] + bytes(30)

    def copy(self) -> Narrow:
        """An independent state."""
        return Narrow(self._state.copy())


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test build: every block key has 16 bits."""
    full = DomainKeys.state
    monkeypatch.setattr(DomainKeys, "state", lambda self, spec: Narrow(full(self, spec)))


def _count_foreign(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts, as [count], foreign nodes that a look-up brought to attach; the decision stays the real one."""
    counts = [0]
    real = PrefixTree.attachable

    def counting(node: Node, domain: Domain, now_us: int) -> bool:
        counts[0] += node.domain is not domain
        return real(node, domain, now_us)

    monkeypatch.setattr(PrefixTree, "attachable", staticmethod(counting))
    return counts


def _probe(count: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """(foreign nodes that came to attach, prompts that were hit); the attacker caches nothing."""
    with monkeypatch.context() as patch:
        world = World(table(), blocks=8192)
        random = Random(10)
        for _ in range(2000):
            world.ask("victim", tokens(random, BLOCK + 1))
        foreign = _count_foreign(patch)
        hits = 0
        for at in range(count):
            answer = world.admit("attacker", tokens(random, BLOCK * (1 + at % 3) + 1))
            hits += answer.hit_tokens > 0
            world.governor.abort(answer.request_id)
        assert not world.governor.check()
        return foreign[0], hits


def _without_domain_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    def attachable(node: Node, domain: Domain, now_us: int) -> bool:
        return now_us < node.ceiling_us and (node.refs > 0 or now_us < node.deadline_us)

    monkeypatch.setattr(PrefixTree, "attachable", staticmethod(attachable))


@pytest.mark.usefixtures("narrow")
def test_a_collision_across_domains_attaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A10, small: 4,000 probes, over fifty of which find a foreign block by its key."""
    found, hits = _probe(4_000, monkeypatch)
    assert found > 50, "void: keys of 16 bits must collide"
    assert hits == 0


@pytest.mark.soak
@pytest.mark.usefixtures("narrow")
def test_collisions_at_full_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A10, full: 10^5 probes."""
    found, hits = _probe(100_000, monkeypatch)
    assert found > 2_000, "void: keys of 16 bits must collide"
    assert hits == 0


@pytest.mark.usefixtures("narrow")
def test_without_the_domain_compare_the_first_collision_is_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A10's control: with the compare at attach off, a foreign block is attached about as early as a birthday says."""
    _without_domain_compare(monkeypatch)
    firsts = [_first_foreign(seed) for seed in range(8)]
    mean = sum(firsts) / len(firsts)
    assert all(firsts) and 100 < mean < 1500, f"void: a foreign attach after some hundred entries, not {firsts}"


def _first_foreign(seed: int) -> int:
    """Entries until a prompt that its tenant never sent is hit in the other tenant's block."""
    world = World(table(), blocks=8192)
    random = Random(seed)
    of_tenant: dict[int, str] = {}
    for at in range(1, 4000):
        tenant = ("victim", "attacker")[at % 2]
        answer = world.admit(tenant, tokens(random, BLOCK + 1))
        if answer.hit_tokens and of_tenant[int(answer.blocks[0])] != tenant:
            return at
        of_tenant[int(answer.blocks[0])] = tenant
        world.finish(answer, BLOCK + 1)
    return 0


@pytest.mark.usefixtures("narrow")
def test_a_collision_inside_one_domain_would_be_served() -> None:
    """A10, said honestly: no token compare stands behind the key inside a domain. Its 256 bits do."""
    world = World(table(), blocks=8192)
    random = Random(3)
    wrong = sum(world.hit("victim", tokens(random, BLOCK + 1)) > 0 for _ in range(2000))
    assert wrong > 0, "void: 2,000 keys of 16 bits must collide with each other"


def test_at_full_width_nothing_collides() -> None:
    """The same prompts under whole keys: no hit."""
    world = World(table(), blocks=8192)
    random = Random(3)
    assert sum(world.hit("victim", tokens(random, BLOCK + 1)) > 0 for _ in range(2000)) == 0


def test_keys_in_the_index_have_their_full_width() -> None:
    """256 bits, not a shorter digest padded: no byte position is constant over 500 keys."""
    world = World(table())
    random = Random(4)
    for _ in range(500):
        world.ask("victim", tokens(random, BLOCK + 1))
    keys = [key for key, _ in world.governor.managers[0].tree.index.items()]
    assert len(keys) == 500
    assert all(len({key[at] for key in keys}) > 100 for at in range(32))
