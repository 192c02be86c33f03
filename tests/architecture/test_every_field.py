"""What validates does something: every field of a policy and every setting is read where something is done with it.

A field that nothing reads is a promise that nobody keeps. It is removed, or lint and every start tell of it until it
works (`policies.workbench.lint.without_effect`); then it stands here, too.
"""

from __future__ import annotations

import ast
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path

import pytest

from kvcustody.governance.service.settings import ServiceSettings
from kvcustody.governance.settings import Settings
from kvcustody.policies.document import model
from standins.architecture.parsed import parsed_text

ROOT = Path(__file__).parents[2]
ROOMS = (
    "allocator",
    "audit",
    "console",
    "governance",
    "integrations",
    "kernels",
    "lab",
    "policies",
    "testkit",
)
SAYS_ONLY = (
    "policies/reading",
    "policies/document",
    "policies/workbench",
)  # these read it, and do nothing with it
WITHOUT_EFFECT: set[str] = set()


@cache
def attributes_read(text: str) -> frozenset[str]:
    return frozenset(
        node.attr
        for node in ast.walk(parsed_text(text))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    )


def read_in(*, besides: tuple[str, ...]) -> set[str]:
    paths = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    return {
        name
        for path in paths
        if not str(path.relative_to(ROOT)).startswith(besides)
        for name in attributes_read(path.read_text(encoding="utf-8"))
    }


def policy_fields() -> set[str]:
    kinds = (kind for kind in vars(model).values() if isinstance(kind, type) and is_dataclass(kind))
    return {f"{kind.__name__}.{field.name}" for kind in kinds for field in fields(kind)}


def unread(names: set[str], read: set[str]) -> set[str]:
    return {name for name in names if name.rpartition(".")[2] not in read}


def test_every_field_of_a_policy_is_read_by_what_acts() -> None:
    assert unread(policy_fields(), read_in(besides=SAYS_ONLY)) == WITHOUT_EFFECT


@pytest.mark.parametrize("settings", [Settings, ServiceSettings])
def test_every_setting_is_read(settings: type[Settings] | type[ServiceSettings]) -> None:
    assert unread(set(settings.model_fields), read_in(besides=())) == set()


def test_a_field_that_nobody_reads_is_found() -> None:
    """The control; and writing one is not reading it."""
    assert unread({"Eviction.never_read", "Eviction.kind"}, read_in(besides=SAYS_ONLY)) == {"Eviction.never_read"}
    assert set(attributes_read("policy.kept = policy.read")) == {"policy", "read"} - {"policy"}
