"""Declarations of operations, without a web framework: the function that answers each, and its answer model.

1. The groups of operations are imported when they are asked for. How a path begins says which may have it.
2. A server calls what is declared here (`http.gate`), and so does a call in this process (`local_calls`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kvcustody.governance.api.given import DeskDep
from kvcustody.governance.api.operation_function import DeclaredOperation, Endpoint, OperationFunction
from kvcustody.governance.service.operations.operation import Operation, Operations

if TYPE_CHECKING:
    from pydantic import BaseModel

_GROUPS = {  # in the order of the API document: the function that declares a group, how its paths begin
    "health:add_health": ("health", "inbox", "metrics"),
    "principals:add_self_service": (*("keys", "openapi.json", "session", "version", "whoami"),),
    "principals:add_enrolment": ("principals",),
    "principals:add_principal_endings": ("principals",),
    "key_custody:add_key_custody": ("keys",),
    "custody:add_custody": ("audit/counts", "audit/gaps", "custody", "orphans/findings"),
    "tiers:add_tiers": ("tiers",),
    "routing.route_receipts:add_routes": ("routes",),
    "audit:add_audit": ("audit",),
    "event_stream:add_stream": ("audit/stream",),
    "erasures:add_erasures": ("erasures",),
    "privacy.cases:add_cases": ("cases",),
    "policy_workbench:add_workbench": ("decisions", "policies"),
    "grants:add_grants": ("policies",),  # before the revisions, whose paths have a number in this place
    "policy_release:add_policies": ("policies",),
    "reports_and_checks:add_evidence": ("checks", "reports"),
    "privacy.processing_records:add_processing_records": ("reports",),
    "jobs:add_jobs": ("exports", "jobs"),
    "fleet:add_fleet": ("capacity", "clock", "orphans", "prefixes", "quotas", "showback", "sinks"),
    "fleet:add_scan_orders": ("orphans", "worker", "workers"),
    "workers:add_workers": ("worker", "workers"),
    "workers:add_doors": ("doors", "worker"),
}


class OperationFunctions(dict[str, OperationFunction]):
    """The functions of operations by name; each is prepared at its first use."""

    def __init__(self, by_name: Mapping[str, DeclaredOperation]) -> None:
        super().__init__()
        self._by_name = by_name

    def __missing__(self, name: str) -> OperationFunction:
        self[name] = OperationFunction(self._by_name[name])
        return self[name]


class Declarations:
    """The declared operations of one or more groups."""

    def __init__(self) -> None:
        self.operations = Operations()
        self.by_name: dict[str, DeclaredOperation] = {}
        self.functions = OperationFunctions(self.by_name)

    def add(
        self,
        operation: Operation,
        function: Endpoint,
        *,
        answers: type[BaseModel] | None = None,
        status: int = 200,
        problems: Sequence[str] = (),
        media: str = "application/json",
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Declare an operation: `answers` is the model of its success, `problems` what it may give besides."""
        self.operations.add(operation)
        self.by_name[operation.name] = DeclaredOperation(
            operation, function, answers, status, problems, media, more, _reads(function)
        )


def _reads(function: Endpoint) -> bool:
    """Whether a function takes a desk, so a ledger itself can answer."""
    return any(one.annotation in ("DeskDep", DeskDep) for one in inspect.signature(function).parameters.values())


@cache
def every_operation() -> Declarations:
    """All operations of version 1."""
    return _declared(_GROUPS)


def operations_at(path: str) -> Declarations:
    """The operations of the given groups that may have this path (rule 1)."""
    asked = re.split("[/:]", path.removeprefix("/v1").removeprefix("/"))
    return _declared(group for group, begins in _GROUPS.items() if any(map(partial(_begins, asked), begins)))


def _begins(asked: list[str], beginning: str) -> bool:
    words = beginning.split("/")
    return asked[: len(words)] == words


def _declared(groups: Iterable[str]) -> Declarations:
    made = Declarations()
    for group in groups:
        module, _, add = group.partition(":")
        getattr(import_module(f"kvcustody.governance.api.operations.{module}"), add)(made)
    return made
