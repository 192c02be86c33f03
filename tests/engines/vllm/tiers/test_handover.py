"""Prefill and decode on two real engines: what one computed the other continues, under its own ticket alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from sqlalchemy import select

from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.ledger import events
from standins.engines.vllm.local_engine import BLOCK
from standins.engines.vllm.tier_engines import PREFIX, prompt, tier
from standins.waiting import until

if TYPE_CHECKING:
    from standins.engines.vllm.local_engine import LocalEngine
    from standins.engines.vllm.prefill_and_decode import Handing


@pytest.fixture(scope="module")
def handing(engines: Callable[..., LocalEngine], tmp_path_factory: pytest.TempPathFactory) -> Handing:
    from standins.engines.vllm import prefill_and_decode

    return prefill_and_decode.handing(engines, tmp_path_factory.mktemp("handing"))


def leaves(handing: Handing) -> list[dict[str, Any]]:
    assert handing.decode.deployment is not None
    store = open_store(handing.decode.deployment.ledger_url, read_only=True)
    with store.connect() as connection:
        found = connection.scalars(
            select(events.c.leaf).where(events.c.kind == "blocks-handed-over").order_by(events.c.at_us)
        ).all()
    store.dispose()
    return [orjson.loads(bytes(leaf)) for leaf in found]


def test_the_decode_engine_continues_what_the_other_prefilled(handing: Handing, plain: LocalEngine) -> None:
    mine = prompt(1)
    expected = plain.ask(mine, tenant="alpha", max_tokens=24).tokens
    ticket = handing.prefilled(mine, tenant="alpha")
    assert ticket.startswith("kvh1.")
    answer = handing.decoded(mine, ticket, tenant="alpha", max_tokens=24)
    assert (answer.cached_tokens, answer.tokens) == (PREFIX * BLOCK, expected)
    steps = until(lambda: len(found := leaves(handing)) >= 3 and found, 20)
    assert {one["step"] for one in steps} == {"offered", "given", "received"}
    assert len({one["ticket"] for one in steps}) == 1, "both workers' leaves are found by it"
    assert handing.decode.governance("scan") == handing.prefill.governance("scan") == []


def test_a_ticket_is_used_once_and_by_whom_it_is_of(handing: Handing, plain: LocalEngine) -> None:
    mine = prompt(2)
    expected = plain.ask(mine, tenant="beta", max_tokens=8).tokens
    ticket = handing.prefilled(mine, tenant="beta")
    for whose in ({"tenant": "gamma"}, {"tenant": "beta", "subject": "other"}):
        foreign = handing.decoded(mine, ticket, max_tokens=8, **whose)
        assert (foreign.cached_tokens, foreign.tokens) == (0, expected)
    other = handing.decoded(prompt(3), ticket, tenant="beta", max_tokens=8)
    assert other.cached_tokens == 0, "nor with another prompt"
    for subject, forged in enumerate((ticket[:-8] + "AAAAAAAA", "kvh1.", ticket + "A", "")):
        named = {"tenant": "beta", "subject": f"s{subject}", "max_tokens": 2}
        assert handing.decoded(prompt(4), forged, **named).cached_tokens == 0
    own = handing.decoded(mine, ticket, tenant="beta", max_tokens=8)
    assert (own.cached_tokens, own.tokens) == (PREFIX * BLOCK, expected), "control: nobody used it up"


@pytest.mark.parametrize("count", [8, pytest.param(300, marks=pytest.mark.soak)])
def test_answers_are_those_of_one_engine(handing: Handing, count: int) -> None:
    """Of one with the same pool, which computes all of it: another size of pool rounds some sums otherwise."""
    handed = 0
    for number in range(count):
        mine, tenant = prompt(100 + number, 2 + number % 9), f"t{number % 5}"
        mine = [*mine, *range(30, 30 + number % 31)]
        expected = handing.prefill.ask(mine, tenant=f"{tenant}-alone", max_tokens=6).tokens
        ticket = handing.prefilled(mine, tenant=tenant)
        answer = handing.decoded(mine, ticket, tenant=tenant, max_tokens=6)
        assert answer.tokens == expected, number
        handed += answer.cached_tokens > 0
    print(f"{count} requests, {handed} continued what the other engine had computed, all answers equal")
    assert handed > 0.9 * count


def test_a_ticket_for_another_worker_brings_nothing(handing: Handing) -> None:
    mine = prompt(5)
    ticket = handing.prefilled(mine, tenant="delta", peer="decode-2")
    assert ticket and handing.decoded(mine, ticket, tenant="delta").cached_tokens == 0
    assert handing.prefilled(prompt(6), tenant="delta", peer="nobody") == "", "nor is one made for who is not trusted"


def test_a_tenant_whose_blocks_may_not_leave_is_not_handed_over(handing: Handing, plain: LocalEngine) -> None:
    mine = prompt(7)
    ticket = handing.prefilled(mine, tenant="secret")
    answer = handing.decoded(mine, ticket, tenant="secret", max_tokens=8)
    assert (answer.cached_tokens, answer.tokens) == (0, plain.ask(mine, tenant="secret", max_tokens=8).tokens)


def test_an_erasure_between_prefill_and_decode_leaves_nothing(handing: Handing, plain: LocalEngine) -> None:
    mine = prompt(8)
    ticket = handing.prefilled(mine, tenant="epsilon")
    until(lambda: tier(handing.prefill)["copies"] > 0)
    handing.prefill.governance("erase", "epsilon", None, None)
    answer = handing.decoded(mine, ticket, tenant="epsilon", max_tokens=8)
    assert (answer.cached_tokens, answer.tokens) == (
        0,
        plain.ask(mine, tenant="epsilon", max_tokens=8).tokens,
    )
