"""Salts of domains, and the file that tells another process whose each is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvcustody.errors import ConfigError
from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.governance.identity.domain_spec import DomainSpec, ScopeKind, tenant_owner
from kvcustody.governance.tiers import scope_salts
from kvcustody.governance.tiers.scope_salts import SALT_DIGITS, ScopeDirectory, ScopeSalts
from kvcustody.testkit.conform.scripts.ours.kvcustody_tier import OurTier


@pytest.fixture
def our(tmp_path: Path) -> Iterator[OurTier]:
    with ExitStack() as stack:
        yield OurTier(tmp_path, stack)


def test_a_domain_has_one_salt_and_no_other_has_it(our: OurTier, tmp_path: Path) -> None:
    salts = ScopeSalts(our.keys, ScopeDirectory(tmp_path / "salts", our.keys))
    labels = [
        our.label("acme"),
        our.label("beta"),
        our.label("acme", weights_digest="other"),
        our.label("acme", salt="x"),
    ]
    made = [salts.of(label) for label in labels]
    assert made == [salts.of(label) for label in labels] and len(set(made)) == 4
    assert all(len(salt) == SALT_DIGITS for salt in made) and len({salts.once() for _ in range(100)}) == 100


def test_another_process_learns_whose_it_is_and_nobody_elses(our: OurTier, tmp_path: Path) -> None:
    path = tmp_path / "salts"
    reader = ScopeDirectory(path, our.keys)
    salts = ScopeSalts(our.keys, ScopeDirectory(path, our.keys))
    salt = salts.of(our.label("acme"))
    found = reader.label_of(salt)
    assert found == our.label("acme") and found is not None and found.spec == our.label("acme").spec
    assert reader.label_of("ab" * 32) is None and reader.label_of("") is None
    data = path.read_bytes()
    assert b"acme" not in data and salt.encode() not in data and path.stat().st_mode & 0o777 == 0o600
    size = path.stat().st_size
    salts.of(our.label("acme"))
    ScopeSalts(our.keys, ScopeDirectory(path, our.keys)).of(our.label("acme"))
    assert path.stat().st_size == size, "a domain is told once"


def test_what_was_changed_or_torn_tells_nothing_and_hides_nothing_else(our: OurTier, tmp_path: Path) -> None:
    path = tmp_path / "salts"
    salts = ScopeSalts(our.keys, ScopeDirectory(path, our.keys))
    first = salts.of(our.label("acme"))
    place = path.stat().st_size - 1
    second = salts.of(our.label("beta"))
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data) + data[:40])  # and the beginning of a record whose writer was killed
    reader = ScopeDirectory(path, our.keys)
    assert reader.label_of(first) is None and reader.label_of(second) == our.label("beta")
    again = ScopeSalts(our.keys, ScopeDirectory(path, our.keys))
    assert again.of(our.label("acme")) == first
    assert reader.label_of(first) == our.label("acme"), "told anew, in the place of the torn end"


def test_an_ended_epoch_ends_its_salts(our: OurTier, tmp_path: Path) -> None:
    path = tmp_path / "salts"
    label = our.label("acme")
    salts = ScopeSalts(our.keys, ScopeDirectory(path, our.keys))
    salt = salts.of(label)
    our.keyring.destroy(tenant_owner("idp", "acme"), 1)
    assert salts.of(label) != salt
    assert ScopeDirectory(path, our.keys).label_of(salt) is None


def test_what_belongs_to_several_is_told_to_nobody(our: OurTier) -> None:
    spec = DomainSpec(scope=ScopeKind.PUBLIC, classification="internal", model=bytes(32), key_epoch=1)
    label = DomainLabel("acme", "internal", 0, "public", None, None, spec)
    salts = ScopeSalts(our.keys)
    assert salts.of(label) != salts.of(label)


def test_a_full_file_tells_no_more(our: OurTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    salts = ScopeSalts(our.keys, ScopeDirectory(tmp_path / "salts", our.keys))
    first = salts.of(our.label("acme"))
    monkeypatch.setattr(scope_salts, "_FILE_BYTES_MAX", 1)
    assert salts.of(our.label("beta")) != salts.of(our.label("beta"))
    assert salts.of(our.label("acme")) == first


def test_a_file_that_others_may_read_is_refused(our: OurTier, tmp_path: Path) -> None:
    path = tmp_path / "salts"
    path.touch(mode=0o644)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="0600"):
        ScopeDirectory(path, our.keys)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(ConfigError, match="cannot be opened"):
        ScopeDirectory(tmp_path / "link", our.keys)
