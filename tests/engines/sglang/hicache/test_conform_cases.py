"""The cases of `kvcustody known-bugs` at SGLang's HiCache: found in its files, not in our storage; in ours where a
defence is off."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from kvcustody.governance.tiers.seal_keys import SealKeys
from kvcustody.integrations.sglang import hicache_storage
from kvcustody.testkit.conform.public_cases import TARGET_OF
from kvcustody.testkit.conform.scripts.engines import sglang_hicache
from kvcustody.testkit.conform.scripts.ours import kvcustody_hicache

FOUND = {"model-revision", "clear-at-rest", "erase-tenant"}
TIER = "kvcustody.governance.tiers.tier."


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """A script sets its own settings, as a process of its own may."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize("case", TARGET_OF["kvcustody-hicache"].cases)
def test_with_ours(case: str) -> None:
    assert kvcustody_hicache.main(case)["found"] is False


@pytest.mark.parametrize("case", TARGET_OF["sglang-hicache"].cases)
def test_sglang_alone(case: str) -> None:
    assert sglang_hicache.main(case)["found"] is (case in FOUND)


def _keep(key: Any, name: bytes, facts: Any, content: Any, into: memoryview, **_: Any) -> int:
    into[len(into) - len(content) :] = content
    return len(into)


def _take(key: Any, name: bytes, facts: Any, sealed: memoryview, into: memoryview) -> None:
    into[:] = sealed[len(sealed) - len(into) :]


@pytest.mark.parametrize("case", ["renamed-object", "older-object", "clear-at-rest"])
def test_a_storage_that_seals_nothing_is_found(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TIER + "seal_into", _keep)
    monkeypatch.setattr(TIER + "open_into", _take)
    assert kvcustody_hicache.main(case)["found"] is True


@pytest.mark.parametrize("case", ["other-model", "model-revision"])
def test_a_storage_that_knows_no_model_is_found(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hicache_storage, "weights_fingerprint", lambda *_: "one")
    assert kvcustody_hicache.main(case)["found"] is True


def test_names_of_pages_alone_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    one = bytes.fromhex(kvcustody_hicache.ONE)
    monkeypatch.setattr(SealKeys, "namer", lambda self, spec, **_: lambda last: one)
    assert kvcustody_hicache.main("name-tells-tenant")["found"] is True
