"""Leaves: canonical bytes, continuation, pseudonyms, two clocks, logs (R-AUD-1)."""

from __future__ import annotations

import string
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest
import rfc8785
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcustody.audit import kinds as module
from kvcustody.audit.kinds import (
    KINDS,
    CustodyChanged,
    DecisionRecorded,
    Event,
    HitCounted,
    HoldsNarrowed,
    KeyEvent,
    ReceiptRecorded,
    ResidencyOpened,
    ResidencyReleased,
    logs_of,
)
from kvcustody.audit.kinds.block_runs import Run, Runs, decode_flat, flatten
from kvcustody.audit.leaf import LEAF_BYTES_MAX, LEAF_KEYS, Context, leaf, leaves
from kvcustody.audit.leaf.leaf_schema import FOLDED, plain_type
from kvcustody.errors import LedgerError

CONTEXT = Context("ab" * 16, 1_700_000_000_000_000, lambda tenant, subject, session="": f"pseudonym{len(session)}")
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
numbers = st.integers(-(2**62), 2**62)
run_lists = st.lists(
    st.builds(
        lambda b, g: Run(np.array(b, np.int64), g),
        st.lists(st.integers(0, 10**6), min_size=1),
        numbers.map(abs),
    ),
    max_size=3,
).map(tuple)
BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    int: numbers,
    str: text,
    str | None: st.none() | text,
    bool: st.booleans(),
    float: st.floats(0, 1),
    Runs: run_lists,
    tuple[int, ...]: st.lists(st.integers(0, 2**40), max_size=3).map(tuple),
    tuple[str, ...]: st.lists(text, max_size=3).map(tuple),
}


def held(kind: Any) -> st.SearchStrategy[Any]:
    """What may be an item of a leaf of acme's: of this process, without a trace."""
    fields = {field.name: BY_TYPE[plain_type(field.type)] for field in msgspec.structs.fields(kind)}
    own = {
        "incarnation": st.just(""),
        "trace": st.just(""),
        "tenant": st.just("acme"),
        "at_us": st.integers(0, 2**52),
    }
    fields |= {name: value for name, value in own.items() if name in fields}
    return st.lists(st.builds(kind, **fields), max_size=2).map(tuple)


BY_TYPE |= {tuple[kind, ...]: held(kind) for kind in FOLDED.values()}  # type: ignore[valid-type]


def events_of(kind: Any) -> st.SearchStrategy[Event]:
    fields = {field.name: BY_TYPE[plain_type(field.type)] for field in msgspec.structs.fields(kind)}
    fields["at_us"] = st.integers(0, 2**52)
    if kind is CustodyChanged:
        fields["tenant"] = st.just("acme")
    if "names" in fields:  # lists of copies are equally long
        small = st.integers(0, 2**40)
        name = st.text("0123456789abcdef", min_size=1, max_size=64)
        pairs = {tuple[int, ...]: st.tuples(small, small), tuple[str, ...]: st.tuples(name, name)}
        fields |= {
            field.name: pairs[plain_type(field.type)]
            for field in msgspec.structs.fields(kind)
            if plain_type(field.type) in pairs
        }
    return st.builds(kind, **fields)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_leaf_bytes_are_rfc8785_of_a_closed_schema(kind: Any, data: st.DataObject) -> None:
    event = data.draw(events_of(kind))
    for made in leaves(event, CONTEXT, 7):
        body = orjson.loads(made.data)
        assert made.data == rfc8785.dumps(body)
        assert len(made.data) <= LEAF_BYTES_MAX
        assert set(body) <= LEAF_KEYS[KINDS[kind].name]
        assert all(set(key) <= set(string.ascii_lowercase + "_") for key in body)
        assert body == orjson.loads(orjson.dumps(made.body))


def test_every_event_has_a_class_and_every_class_an_event() -> None:
    declared = {
        item
        for item in vars(module).values()
        if isinstance(item, type) and issubclass(item, Event) and item is not Event
    }
    assert declared == set(KINDS)
    assert {kind.outage for kind in KINDS.values()} == {"A", "B", "C"}


def test_big_integers_become_decimal_strings_and_floats_are_refused() -> None:
    body = orjson.loads(leaf(KeyEvent(1, None, "made", 2**53, "operator"), CONTEXT))
    assert body["epoch"] == str(2**53)
    assert orjson.loads(leaf(KeyEvent(1, None, "made", 2**53 - 1, "operator"), CONTEXT))["epoch"] == 2**53 - 1
    with pytest.raises(LedgerError, match="float"):
        leaf(KeyEvent(1, None, "made", 1.5, "operator"), CONTEXT)  # type: ignore[arg-type]


def test_both_clocks_are_in_the_leaf() -> None:
    body = orjson.loads(leaf(KeyEvent(123, None, "made", 1, "operator"), CONTEXT))
    assert body["boot_us"] == 123 and body["at_us"] == 123 + CONTEXT.offset_us


def test_subject_and_session_appear_only_as_pseudonyms() -> None:
    event = ResidencyOpened(
        1, 1, "acme", "alice@example.org", "chat-of-alice", False, "internal", (), (), ("own",), 1, 9
    )
    data = leaf(event, CONTEXT)
    assert b"alice" not in data and b"pseudonym" in data


def test_a_share_is_parts_per_million() -> None:
    event = ReceiptRecorded(1, 1, 0, None, "memset", "cpu", 8, 1, 2, "sampled", 1 / 64, 1, "ok", ())
    assert orjson.loads(leaf(event, CONTEXT))["share_ppm"] == 15625


def test_a_million_scattered_tokens_continue_over_leaves_and_come_back_exactly() -> None:
    blocks = np.random.default_rng(1).permutation(62_500)
    run = Run(blocks, 40)
    made = leaves(ResidencyReleased(1, 1, "acme", "finish", (run,), 0), CONTEXT, 1)
    assert [item.body["part"] for item in made] == list(range(1, len(made) + 1))
    assert {item.body["parts"] for item in made} == {len(made)} and len(made) > 10
    assert {item.body["blocks"] for item in made} == {62_500}
    assert max(len(item.data) for item in made) <= LEAF_BYTES_MAX
    pairs, _ = decode_flat([item for one in made for item in orjson.loads(one.data)["runs"]])
    assert pairs.blocks.tolist() == blocks.tolist()
    assert pairs.generations.tolist() == flatten([run]).generations.tolist()
    with pytest.raises(LedgerError, match="leaves"):
        leaf(ResidencyReleased(1, 1, "acme", "finish", (run,), 0), CONTEXT)


def test_both_run_lists_of_an_opening_continue_over_leaves() -> None:
    scattered = np.random.default_rng(2).permutation(5_000)
    attached, written = (Run(scattered[:2_000], 7),), (Run(scattered[2_000:], 9_000), Run(scattered[:1], 50))
    event = ResidencyOpened(1, 1, "acme", None, None, False, "internal", (), attached, ("own",), 1, 9, written)
    made = leaves(event, CONTEXT, 1)
    bodies = [orjson.loads(one.data) for one in made]
    assert len(made) > 2 and max(len(item.data) for item in made) <= LEAF_BYTES_MAX
    assert {(body["blocks"], body["written_blocks"], body["parts"]) for body in bodies} == {(2_000, 3_001, len(made))}
    for key, runs in (("runs", attached), ("written", written)):
        pairs, _ = decode_flat([item for body in bodies for item in body[key]])
        assert pairs.blocks.tolist() == flatten(runs).blocks.tolist()
        assert pairs.generations.tolist() == flatten(runs).generations.tolist()


def test_a_head_that_no_leaf_can_hold_is_refused() -> None:
    with pytest.raises(LedgerError, match="does not fit"):
        leaves(KeyEvent(1, None, "x" * 9000, 1, "operator"), CONTEXT, 1)


def test_cross_tenant_reuse_is_in_both_logs() -> None:
    event = DecisionRecorded(1, "reuse", "permit", "labs", "acme", "internal", ("grant-1",), 3)
    assert logs_of(event) == ("tenant/labs", "tenant/acme")
    assert [item.log for item in leaves(event, CONTEXT, 1)] == ["tenant/labs", "tenant/acme"]
    assert logs_of(event._replace(owner="labs")) == ("tenant/labs",)
    assert logs_of(HitCounted(1, "acme", "acme", "reuse", "permit", "own", 1)) == ("tenant/acme",)
    assert logs_of(KeyEvent(1, None, "made", 1, "operator")) == ("system",)


TRACED = [kind for kind in KINDS if "trace" in LEAF_KEYS[KINDS[kind].name]]


@pytest.mark.parametrize("kind", TRACED, ids=lambda kind: kind.__name__)
def test_a_leaf_without_a_trace_is_what_it_was_before_there_were_any(kind: Any) -> None:
    """The key is absent, not empty; with a trace it is the only difference."""
    some: dict[Any, Any] = {
        int: 7,
        bool: False,
        Runs: (),
        tuple[int, ...]: (),
        tuple[str, ...]: ("own",),
    }
    event = kind(
        **{
            field.name: some.get(plain_type(field.type), "acme")
            for field in msgspec.structs.fields(kind)
            if field.name != "trace"
        }
    )
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    bare, traced = (leaves(each, CONTEXT, 3)[0] for each in (event, event._replace(trace=trace)))
    assert set(bare.body) == LEAF_KEYS[KINDS[kind].name] - {"trace"} and b"trace" not in bare.data
    assert traced.body == bare.body | {"trace": trace}
    assert traced.data == rfc8785.dumps(traced.body)


def test_the_leaf_of_the_first_days_has_the_same_bytes() -> None:
    """Bytes of a leaf as they were written before traces, so that no root of an earlier ledger moves."""
    made = leaf(KeyEvent(1, "acme", "made", 2, "operator"), CONTEXT, 9)
    assert made == (
        b'{"action":"made","actor":"operator","at_us":1700000000000001,"boot_us":1,"epoch":2,"incarnation":"'
        + b"ab" * 16
        + b'","kind":"key-event","log":"tenant/acme","outage":"A","part":1,"parts":1,"schema":"kvcustody/event@1",'
        b'"sequence":9,"tenant":"acme"}'
    )


def test_the_owner_does_not_see_the_readers_trace() -> None:
    event = DecisionRecorded(1, "reuse", "permit", "labs", "acme", "internal", ("g",), 3, trace="ab" * 16)
    mine, owners = leaves(event, CONTEXT, 1)
    assert (mine.log, mine.body["trace"]) == ("tenant/labs", "ab" * 16)
    assert owners.log == "tenant/acme" and b"trace" not in owners.data
    assert {**mine.body, "log": owners.log} == {**owners.body, "trace": "ab" * 16}


def test_a_long_list_of_holds_continues_over_leaves_pair_by_pair() -> None:
    holds = tuple(range(1, 5_000))
    until = tuple(10**12 + 7 * number for number in holds)
    made = leaves(HoldsNarrowed(5, "acme", 3, holds, until), CONTEXT, 9)
    assert [leaf.body["part"] for leaf in made] == [*range(1, len(made) + 1)] and len(made) > 10
    assert all(6_000 < len(leaf.data) <= LEAF_BYTES_MAX for leaf in made[:-1])
    rows = [row for leaf in made for row in zip(leaf.body["holds"], leaf.body["until_boot_us"], strict=True)]
    assert rows == [*zip(holds, until, strict=True)]
    assert {leaf.body["parts"] for leaf in made} == {len(made)}
