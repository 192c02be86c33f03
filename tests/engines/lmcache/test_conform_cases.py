"""The cases of `kvcustody known-bugs` at LMCache: none is found with ours but one, which its page names; each where a
defence is off."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcustody.governance.tiers.scope_salts import ScopeDirectory
from kvcustody.integrations.lmcache import custody_thread, sealed_serde
from kvcustody.testkit.conform.public_cases import TARGET_OF
from kvcustody.testkit.conform.scripts.layers import lmcache_files
from kvcustody.testkit.conform.scripts.ours import kvcustody_lmcache

KNOWN = {("serde", "older-object")}
CASES = [
    (part, case)
    for part, target in (("adapter", "kvcustody-lmcache"), ("serde", "kvcustody-lmcache-serde"))
    for case in TARGET_OF[target].cases
]
TIER = "kvcustody.governance.tiers.tier."


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """A script sets its own settings, as a process of its own may."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.system
@pytest.mark.parametrize(("part", "case"), CASES)
def test_with_ours(part: str, case: str) -> None:
    assert kvcustody_lmcache.main(case, part)["found"] is ((part, case) in KNOWN)


@pytest.mark.parametrize("case", TARGET_OF["lmcache-files"].cases)
def test_lmcache_alone(case: str) -> None:
    assert lmcache_files.main(case)["found"] is True


def _keep(key: Any, name: bytes, facts: Any, content: Any, into: memoryview, **_: Any) -> int:
    into[len(into) - len(content) :] = content
    return len(into)


def _take(key: Any, name: bytes, facts: Any, sealed: memoryview, into: memoryview) -> None:
    into[:] = sealed[len(sealed) - len(into) :]


@pytest.mark.system
@pytest.mark.parametrize("case", ["renamed-object", "older-object", "clear-at-rest"])
def test_an_adapter_that_seals_nothing_is_found(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TIER + "seal_into", _keep)
    monkeypatch.setattr(TIER + "open_into", _take)
    assert kvcustody_lmcache.main(case)["found"] is True


@pytest.mark.system
@pytest.mark.parametrize("part", ["adapter", "serde"])
def test_salts_that_all_stand_for_one_tenant_are_found(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    label_of, first = ScopeDirectory.label_of, []

    def one_label(self: ScopeDirectory, salt: str) -> Any:
        first.append(label_of(self, salt))
        return first[0]

    monkeypatch.setattr(ScopeDirectory, "label_of", one_label)
    assert kvcustody_lmcache.main("salt-dropped", part)["found"] is True


@pytest.mark.system
@pytest.mark.parametrize(
    ("part", "case"), [("adapter", "other-model"), ("serde", "other-model"), ("serde", "renamed-object")]
)
def test_objects_without_names_of_their_own_are_found(part: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = custody_thread if part == "adapter" else sealed_serde
    monkeypatch.setattr(module, "chunk_key", lambda key: bytes(32))
    assert kvcustody_lmcache.main(case, part)["found"] is True


@pytest.mark.system
def test_a_tier_that_erases_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcustody.governance.tiers.copies.ends.may_hold", lambda *_: False)
    assert kvcustody_lmcache.main("erase-tenant")["found"] is True


@pytest.mark.system
def test_names_of_chunks_alone_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    files = kvcustody_lmcache.Site.files

    def named(self: kvcustody_lmcache.Site) -> list[Path]:
        return [path.rename(path.with_name((1).to_bytes(32, "big").hex())) for path in files(self)]

    monkeypatch.setattr(kvcustody_lmcache.Site, "files", named)
    assert kvcustody_lmcache.main("name-tells-tenant")["found"] is True
