"""Single-line mutants of the allocator: each must be killed by `check()`, by the model or by a guard that raises.

A mutant is a method whose source has one piece of text replaced. Where the text is no longer there once, the mutant
says so and must be brought up to date with the code.
"""

from __future__ import annotations

import inspect
import textwrap
from typing import NamedTuple

import pytest

from kvcustody.allocator.manager.block_manager import BlockManager
from kvcustody.allocator.manager.reclaim import Reclaimer
from kvcustody.allocator.pool.accounting import Account
from kvcustody.allocator.pool.fence import Fences
from kvcustody.allocator.pool.pool import Pool
from kvcustody.allocator.prefix.copy_on_write import Forks
from kvcustody.allocator.prefix.decode_table import DecodeTable
from kvcustody.allocator.prefix.eviction_policy import EvictionQueue
from kvcustody.allocator.prefix.hash_index import PrefixIndex
from kvcustody.allocator.prefix.publish import Publication
from kvcustody.allocator.prefix.tree import PrefixTree
from standins.allocator.world import World, run, state_of
from standins.simulation.simulation import SECOND, drive, roomy, tight

pytestmark = pytest.mark.system


class Mutant(NamedTuple):
    name: str
    owner: type
    method: str
    old: str
    new: str


MUTANTS = [
    Mutant("ceiling not compared", PrefixTree, "attachable", "now_us < node.ceiling_us", "True"),
    Mutant("deadline not compared", PrefixTree, "attachable", "now_us < node.deadline_us", "True"),
    Mutant("running counts as expired", PrefixTree, "attachable", "node.refs > 0 or ", ""),
    Mutant(
        "ceiling slides at attach",
        PrefixTree,
        "attach",
        "node.used_us = now_us",
        "node.ceiling_us = now_us + (1 << 40)",
    ),
    Mutant("parent's ceiling ignored", PrefixTree, "publish", "min(ceiling, parent.ceiling_us)", "ceiling"),
    Mutant(
        "revived without leaving the queue",
        PrefixTree,
        "_reactivate",
        "queue.remove(node)",
        "pass",
    ),
    Mutant(
        "split forgets references",
        PrefixTree,
        "split",
        "head.refs, head.holds, head.hits = node.refs,",
        "head.refs, head.holds, head.hits = 0,",
    ),
    Mutant(
        "split forgets the ceiling",
        PrefixTree,
        "split",
        "head.ceiling_us, head.deadline_us = node.ceiling_us,",
        "head.ceiling_us, head.deadline_us = head.ceiling_us,",
    ),
    Mutant("holds not decremented", PrefixTree, "lapse", "node.holds -= 1", "pass"),
    Mutant("replaced hold stays", PrefixTree, "_replace_extended", "self._drop_holds(ending_here)", "pass"),
    Mutant("hold keeps no deadline", PrefixTree, "_place_hold", "node.deadline_us = deadline", "pass"),
    Mutant(
        "hold outlives the ceiling",
        PrefixTree,
        "_place_hold",
        "if now_us + idle < leaf.ceiling_us else leaf.ceiling_us",
        "",
    ),
    Mutant(
        "end without descendants",
        PrefixTree,
        "end_subtree",
        "while node.first_child is not None:",
        "while False:",
    ),
    Mutant("fence forgotten at release", PrefixTree, "release", "node.fence = fence", "pass"),
    Mutant("cached without a hold", PrefixTree, "_unreferenced", "if node.holds and", "if"),
    Mutant("index keeps what has ended", PrefixIndex, "remove", "if first == 0:", "if False:"),
    Mutant("generation not changed", Pool, "hand_out", "np.arange(first, first + count)", "first"),
    Mutant("not charged", Account, "charge", "self.used_blocks += count", "pass"),
    Mutant(
        "DIRTY handed out",
        Pool,
        "_scrub_batch",
        "for shard in range(self.memory.shards):",
        "for shard in ():",
    ),
    Mutant(
        "clean ring pushed twice",
        Pool,
        "_make_clean",
        "self.push_clean(partition, np.sort(blocks))",
        "self.push_clean(partition, np.sort(blocks)); self.push_clean(partition, blocks)",
    ),
    Mutant("any move allowed for free", Pool, "move", "self.counts[target] += count", "pass"),
    Mutant("open fences retire at once", Fences, "open", "self._open[self.last] = now_us", "pass"),
    Mutant("any fence is the oldest", Fences, "oldest_open", "return fence", "return fence + 1"),
    Mutant(
        "partial block published",
        BlockManager,
        "commit",
        "computed_tokens // self.options.block_tokens",
        "-(-computed_tokens // self.options.block_tokens)",
    ),
    Mutant("release counts twice", BlockManager, "release", "self.decode.remove(sequence)", "pass"),
    Mutant("release forgets the fence", BlockManager, "release", "fence = sequence.fence", "fence = 0"),
    Mutant(
        "duplicates never end",
        Publication,
        "end_private",
        'EndingRun(blocks, domain, "duplicate", now_us, fence) for blocks, domain in sequence.duplicates',
        "",
    ),
    Mutant(
        "canonical block not referred to",
        Publication,
        "_attach_canonical",
        "tree.incref(node, now_us)",
        "pass",
    ),
    Mutant(
        "expired canonical node joined",
        Publication,
        "_attach_canonical",
        "if not tree.attachable(node, domain, now_us):",
        "if False:",
    ),
    Mutant("child on its parent's table", Forks, "fork", "np.concatenate(path[::-1])", "parent.blocks.copy()"),
    Mutant("shared tail written in place", BlockManager, "_copy_on_write", "if tail.refs > 1:", "if False:"),
    Mutant("copied tail keeps its reference", Forks, "unshare_tail", "self.tree.decref_shared(tail)", "pass"),
    Mutant("evicts a node with children", EvictionQueue, "_below", "while child is not None:", "while False:"),
    Mutant("the cap is no limit", Account, "limit_blocks", "return self.cap_blocks", "return 1 << 30"),
    Mutant("Q3 not asked", Reclaimer, "_may_activate", "return after <= 0 or", "return True or"),
    Mutant("tokens outlive their slot", DecodeTable, "remove", "self.pending[slot].fill(0)", "pass"),
]


def apply(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the method by its mutant, compiled in its own module."""
    raw = inspect.getattr_static(mutant.owner, mutant.method)
    function = getattr(raw, "fget", None) or getattr(raw, "__func__", raw)
    source = textwrap.dedent(inspect.getsource(function))
    count = source.count(mutant.old)
    assert count == 1, f"mutant `{mutant.name}` no longer applies: `{mutant.old}` is there {count} times"
    names: dict[str, object] = {}
    code = "from __future__ import annotations\n" + source.replace(mutant.old, mutant.new)
    exec(compile(code, f"<{mutant.name}>", "exec"), function.__globals__, names)
    monkeypatch.setattr(mutant.owner, mutant.method, names[mutant.method])


def granted() -> None:
    """A reader's continuation under the owner's blocks, while the owner's are evicted."""
    world = World(64)
    world.cache("a", run(1, 5, 1))
    world.cache("b", run(1, 9, 1), grants=("a",))
    for _ in range(5):
        world.m.tree.evict(world.m.accounts["a"], 1, world.now, "test")
        world.ok()


def killer() -> str:
    """What kills the code as it is now; empty where nothing does."""
    try:
        granted()
        for seed in range(6):
            drive(roomy(), seed, 250)
            drive(tight(), seed, 250)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_the_unchanged_code_lives():
    assert killer() == ""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_a_mutant_is_killed(mutant, monkeypatch):
    apply(mutant, monkeypatch)
    assert killer() != "", f"`{mutant.name}` survived"


@pytest.mark.parametrize("mutate", [False, True])
def test_the_domain_is_compared_even_where_two_keys_are_equal(mutate, monkeypatch):
    """A forced key collision between two domains: only the comparison keeps them apart (A10 in small)."""
    if mutate:
        apply(
            Mutant("domain not compared", PrefixTree, "attachable", "node.domain.realm == domain.realm", "True"),
            monkeypatch,
        )
    world = World(64)
    world.chains["b"] = world.chains["b"]._replace(state=state_of("a"))
    world.cache("a", run(1, 4, 1))
    crossed = world.hit("b", run(1, 4, 1))
    assert crossed == (4 if mutate else 0)
    if not mutate:
        assert world.cache("b", run(1, 4, 1)) == world.cache("b", run(1, 4, 1)) == 0
        world.wait(SECOND)
        world.ok()
