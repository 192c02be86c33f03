"""The custody core over its two pools: what it asks of them, and that no facade does it by itself."""

from __future__ import annotations

import ast
import inspect

import pytest

from kvcustody.allocator.external.pool import ExternalPool
from kvcustody.allocator.pool.accounting import Account
from kvcustody.clock import VirtualClock
from kvcustody.deadline_clock import DeadlineClock
from kvcustody.governance.custody import custody as core
from kvcustody.governance.custody.books import Books
from kvcustody.governance.custody.custody import Custody
from kvcustody.governance.decisions.authority import Authority
from kvcustody.governance.external.engine_books import EngineBooks
from kvcustody.governance.external.engine_port import EnginePort
from kvcustody.governance.governor.governor import Governor
from kvcustody.governance.governor.pool_books import PoolBooks
from kvcustody.governance.identity.principal import identify
from kvcustody.governance.ledger_protocol import CountingLedger
from kvcustody.governance.request import NO_HINTS
from standins import builders
from standins.governance.offload_world import MODEL

ASKED = {name for name in vars(Books) if not name.startswith("_")}
ACTS = ("activate", "revoke", "order_enforcement", "restrict", "erase", "scan", "check", "close")


def test_the_core_asks_each_method_of_the_books_and_both_pools_have_it() -> None:
    assert len(ASKED - {"copies"}) == 8
    tree = ast.parse(inspect.getsource(core))
    asked = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self._books", "books")
    }
    assert asked == ASKED
    assert {*dir(PoolBooks), "copies"} >= ASKED and {*dir(EngineBooks)} >= ASKED


@pytest.mark.parametrize("facade", [Governor, EnginePort])
def test_no_facade_has_an_act_of_its_own(facade: type) -> None:
    """But for what a policy may not ask of an engine's own blocks."""
    own = {name for name in ACTS if name in vars(facade)}
    assert own <= ({"activate"} if facade is EnginePort else set())
    assert all(getattr(Custody, name) for name in ACTS)


def test_an_authority_stands_without_a_facade() -> None:
    clock, pool = DeadlineClock(VirtualClock()), ExternalPool(8, shards=1, bytes_per_block=1)

    def account(tenant: str) -> tuple[Account, ExternalPool]:
        return pool.account(tenant), pool

    table, keys = builders.table(builders.policy(), 1), builders.keyring_in_memory(clock)
    authority = Authority(table, keys, CountingLedger(), account, block_tokens=16, clock=clock)
    plan = authority.plan_of(identify(issuer="idp", tenant="holder"), MODEL, None, NO_HINTS)
    assert plan is not None and plan.account is pool.accounts["holder"]
