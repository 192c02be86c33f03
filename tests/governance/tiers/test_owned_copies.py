"""Copies of an engine that nobody governs: what is left of their keys, and of what opened when the rest could not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvcustody.errors import ConfigError
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.shred_keys import ShredKeys
from kvcustody.governance.tiers.owned_copies import OwnedCopies, OwnedTerms, digest_of
from kvcustody.governance.tiers.stores.file_store import FileStore
from standins.engines.vllm.deployment import Deployment

COPY_BYTES = 4096


@pytest.fixture
def open_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], OwnedCopies]:
    for name, value in Deployment(tmp_path / "site").environment().items():
        monkeypatch.setenv(name, value)
    terms = OwnedTerms("engine", "acme", 60.0, 1 << 20, tmp_path / "tier")
    return lambda: OwnedCopies(terms, digest_of("layout"), digest_of("model"), COPY_BYTES, 16)


def test_every_key_is_wiped_when_they_close(open_copies: Callable[[], OwnedCopies]) -> None:
    copies = open_copies()
    assert copies.store(b"a", np.ones(COPY_BYTES, dtype=np.uint8))
    shred, keyring, keys = copies.tier._index.shred, copies._keyring, copies._keys
    secrets = [*shred._secrets.values(), *keyring._secrets.values()]
    sealing = [*keys._keys.values()]
    assert len(secrets) >= 3 and sealing and all(one.filled for one in secrets), "control"
    copies.close()
    assert not any(one.filled for one in secrets) and not any(one._blocks for one in sealing)
    again = open_copies()  # the folder is let go too
    back = np.zeros(COPY_BYTES, dtype=np.uint8)
    assert again.load(b"a", back) and back.all()
    again.close()


def test_what_was_open_is_closed_where_the_rest_cannot_be(
    open_copies: Callable[[], OwnedCopies], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[object] = []
    for kind in (Keyring, FileStore):
        begin = kind.__init__

        def noted(self: object, *given: object, begin: Callable[..., None] = begin, **named: object) -> None:
            begin(self, *given, **named)
            opened.append(self)

        monkeypatch.setattr(kind, "__init__", noted)
    opens = ShredKeys.open.__func__  # type: ignore[attr-defined]

    def open_noted(cls: type[ShredKeys], *given: object) -> ShredKeys:
        opened.append(opens(cls, *given))
        return opened[-1]  # type: ignore[return-value]

    monkeypatch.setattr(ShredKeys, "open", classmethod(open_noted))

    def fail(*_: object) -> None:
        raise ConfigError("no memory")

    with monkeypatch.context() as failing:
        failing.setattr("kvcustody.governance.tiers.owned_copies.Staging", fail)
        with pytest.raises(ConfigError, match="no memory"):
            open_copies()
    keyring, shred, store = opened
    assert isinstance(keyring, Keyring) and not keyring._secrets
    assert isinstance(shred, ShredKeys) and isinstance(store, FileStore)
    for descriptor in (shred._file, store._root, store._mark):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
    open_copies().close()
