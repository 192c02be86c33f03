"""No `Any` and no bare `object` in a signature on the way of a request, from admission to SQL: mypy sees all of it."""

from __future__ import annotations

import ast
import re

import pytest

from standins.architecture.module_graph import ROOT
from standins.architecture.parsed import parsed_text

WAY = [
    "governance/governor/governor.py",
    "governance/governor/sequence_events.py",
    "governance/custody_events.py",
    "governance/request.py",
    "governance/decisions/access_plan.py",
    "governance/decisions/reuse_decision.py",
    "governance/decisions/authority.py",
    "governance/custody/books.py",
    "governance/custody/custody.py",
    "governance/external/engine_port.py",
    "governance/external/monitored_port.py",
    "governance/external/tiered_port.py",
    "governance/external/block_keys.py",
    "governance/external/residency_events.py",
    "policies/table/model.py",
    "policies/table/decision_table.py",
    "allocator/manager/block_manager.py",
    "allocator/prefix/tree.py",
    "allocator/prefix/longest_prefix.py",
    "allocator/prefix/hash_index.py",
    "allocator/prefix/publish.py",
    "allocator/prefix/node.py",
    "allocator/prefix/sequence.py",
    "allocator/pool/pool.py",
    "allocator/pool/accounting.py",
    "allocator/pool/residency.py",
    "allocator/pool/hold_table.py",
    "allocator/external/pool.py",
    "allocator/external/residency.py",
    "audit/kinds/custody_events.py",
    "audit/leaf/batch_encoder.py",
    "audit/write/event_writer.py",
    "audit/write/event_queue.py",
    "audit/write/outage.py",
    "audit/write/sink.py",
    "audit/write/committer.py",
]
# Where anything may come in, or what comes back is not looked at: the name of the parameter, and why.
ANYTHING = {
    "order": "what an operator's order adds to an erasure; checked where it is taken",
    "tenant": "`_well_formed` is there to look at what may be anything",
    "decide": "a callback whose result nobody reads",
    "decided": "the same",
}


def open_annotations(source: str) -> list[str]:
    """Parameters, results and attributes that are annotated with `Any` or `object`."""
    places = []
    for node in ast.walk(parsed_text(source)):
        named: list[tuple[str, ast.expr | None]] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            stars = [star for star in (given.vararg, given.kwarg) if star is not None]
            named = [(arg.arg, arg.annotation) for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs, *stars)]
            named.append((f"{node.name} returns", node.returns))
        elif isinstance(node, ast.AnnAssign):
            named = [(ast.unparse(node.target), node.annotation)]
        places += [
            name
            for name, annotation in named
            if annotation is not None and re.search(r"\b(Any|object)\b", ast.unparse(annotation))
        ]
    return places


@pytest.mark.parametrize("path", WAY)
def test_the_way_of_a_request_is_typed(path: str) -> None:
    assert [name for name in open_annotations((ROOT / path).read_text()) if name not in ANYTHING] == []


def test_an_open_annotation_would_be_seen() -> None:
    source = "class Plan:\n    manager: Any\n    def find(self, *, key: object) -> list[Any]: ...\n"
    assert sorted(open_annotations(source)) == ["find returns", "key", "manager"]
