"""`kvcustody keys rewrap`: the store opens under the new root key, and no longer under the old one."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvcustody.clock import VirtualClock
from kvcustody.console.main import app
from kvcustody.errors import KeyringError
from kvcustody.governance.identity.domain_spec import tenant_owner
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.root_key_wrapping import RootKeyWrapping, open_wrapping, read_root_key
from kvcustody.governance.keys.wrapped_key_store import FileKeyStore


def cli(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(item) for item in arguments])
    return result.exit_code, result.output


def test_rewrap_moves_every_epoch(tmp_path: Path) -> None:
    store, old, new = tmp_path / "keys.json", tmp_path / "old.key", tmp_path / "new.key"
    ring = Keyring(FileKeyStore(store), open_wrapping("generated", old), VirtualClock())
    for tenant in ("acme", "globex"):
        ring.ensure([tenant_owner("idp", tenant)])
    ring.close()
    assert cli("keys", "init", new)[0] == 0
    code, said = cli("keys", "rewrap", store, "--from", old, "--to", new)
    assert code == 0 and "rewrapped: 2 epochs" in said.replace("\n", " ")
    document = FileKeyStore(store).load()
    for (owner, epoch), stored in document.epochs.items():
        with RootKeyWrapping(read_root_key(new)).unwrap(stored.wrapped, owner=owner, epoch=epoch):
            pass
        with pytest.raises(KeyringError):
            RootKeyWrapping(read_root_key(old)).unwrap(stored.wrapped, owner=owner, epoch=epoch)
    before = store.read_bytes()
    assert cli("keys", "rewrap", store, "--from", old, "--to", new)[0] != 0  # the wrong key moves nothing
    assert store.read_bytes() == before
    assert cli("keys", "rewrap", tmp_path / "absent.json", "--from", old, "--to", new)[0] != 0
    assert not (tmp_path / "absent.json").exists()
