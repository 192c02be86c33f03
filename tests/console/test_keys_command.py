"""`kvcustody keys`: what is under a new root key opens under it alone; and the hierarchy is shown without a secret."""

from __future__ import annotations

import base64
import fcntl
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvcustody.clock import SystemClock, VirtualClock
from kvcustody.console import keys
from kvcustody.console.main import app
from kvcustody.errors import KeyringError
from kvcustody.governance.identity.domain_spec import tenant_owner
from kvcustody.governance.keys.key_backups import KeyBackups
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.root_key_wrapping import RootKeyWrapping, open_wrapping, read_root_key
from kvcustody.governance.keys.shred_keys import ShredKeys, read_shred_keys
from kvcustody.governance.keys.wrapped_key_store import FileKeyStore
from kvcustody.times import iso

HOUR = 3_600_000_000


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
    assert "rewrapped: 0 epochs" in cli("keys", "rewrap", store, "--from", old, "--to", new)[1], "moved already"
    assert store.read_bytes() == before
    assert cli("keys", "init", wrong := tmp_path / "wrong.key")[0] == 0
    assert cli("keys", "rewrap", store, "--from", wrong, "--to", old)[0] != 0  # neither opens them
    assert store.read_bytes() == before
    assert cli("keys", "rewrap", tmp_path / "absent.json", "--from", old, "--to", new)[0] != 0
    assert not (tmp_path / "absent.json").exists()


class Deployment:
    """A keyring and shred keys of two tenants, two subjects and two buckets; one of each is destroyed."""

    def __init__(self, folder: Path) -> None:
        self.keyring, self.shred, root = folder / "keys.json", folder / "shred.keys", folder / "root.key"
        clock, port = SystemClock(), open_wrapping("generated", root)
        self.ring = Keyring(FileKeyStore(self.keyring), port, clock)
        acme, globex = tenant_owner("idp", "acme"), tenant_owner("idp", "globex")
        self.ring.ensure([acme, globex])
        self.ring.rotate(acme)
        self.ring.destroy(acme, 1)
        self.keys = ShredKeys.open(self.shred, port, clock)
        self.ada, self.bob = (self.keys.of_subject(f"idp\0acme\0{name}".encode()) for name in ("ada", "bob"))
        now_us = clock.utc_us()
        self.over = self.keys.of_bucket("internal", now_us - 3 * HOUR, HOUR)
        self.late = self.keys.of_bucket("internal", now_us - HOUR, HOUR // 60)
        self.living = self.keys.of_bucket("public", now_us + HOUR, HOUR)
        self.keys.destroy(self.ada.id)
        self.keys.destroy_due(now_us - 2 * HOUR)

    def tree(self, *more: str) -> tuple[int, str]:
        return cli("keys", "tree", "--keyring", self.keyring, "--shred-keys", self.shred, *more)

    def close(self) -> None:
        self.keys.close()
        self.ring.close()


@pytest.fixture
def deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Deployment]:
    monkeypatch.chdir(tmp_path)
    made = Deployment(tmp_path)
    yield made
    made.close()


def test_the_hierarchy_says_what_each_ends_and_when(deployment: Deployment) -> None:
    code, said = deployment.tree("--json")
    tree = json.loads(said)
    assert code == 0
    assert [(key["name"], key["epoch"], key["current"]) for key in tree["epochs"]] == [
        ("acme", 2, True),
        ("globex", 1, True),
    ]
    assert [key["id"] for key in tree["subjects"]] == [deployment.bob.id.hex()]
    assert {key["id"]: (key["classification"], key["overdue"]) for key in tree["buckets"]} == {
        deployment.late.id.hex(): ("internal", True),
        deployment.living.id.hex(): ("public", False),
    }
    shown = next(key for key in tree["buckets"] if not key["overdue"])
    assert shown["when"] == iso(deployment.living.until_us) and "falls due in its time" in shown["ends"]
    assert {key.get("id", key.get("epoch")) for key in tree["destroyed"]} == {
        1,
        deployment.ada.id.hex(),
        deployment.over.id.hex(),
    }
    assert all(key["ends"] and key["when"] for part in ("epochs", "subjects", "buckets") for key in tree[part])


def test_the_hierarchy_is_read_by_people(deployment: Deployment) -> None:
    code, said = deployment.tree()
    told = " ".join(said.split())
    assert code == 0 and "subjects 1" in told and "with the subject's erasure" in told
    assert "expired, but with an existing key: 1 bucket" in told
    assert deployment.ada.id.hex() in told and deployment.bob.id.hex() not in told
    assert "2 more; --last 3" in " ".join(deployment.tree("--last", "1")[1].split())
    deployment.keys.destroy(deployment.late.id)
    assert "still there" not in deployment.tree()[1], "the control"


def test_the_hierarchy_shows_no_secret_and_no_person(deployment: Deployment, tmp_path: Path) -> None:
    (tmp_path / "root.key").unlink()  # it is not needed
    before = deployment.shred.read_bytes(), deployment.keyring.read_bytes()
    output = deployment.tree()[1] + deployment.tree("--json")[1]
    wrapped = [stored.wrapped for stored in FileKeyStore(deployment.keyring).load().epochs.values()]
    assert wrapped and deployment.bob.id.hex() in output, "the control: ids are shown"
    for secret in wrapped:
        assert secret.hex() not in output and base64.b64encode(secret).decode() not in output
    assert bytes(deployment.keys.secret(deployment.bob.id).view()).hex() not in output
    assert deployment.bob.label not in output
    assert not re.findall(r"\b(?:ada|bob)\b", output), "a word of its own: an id may contain the letters"
    assert (deployment.shred.read_bytes(), deployment.keyring.read_bytes()) == before


def test_the_hierarchy_of_the_settings(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCUSTODY_KEYRING_PATH", str(deployment.keyring))
    monkeypatch.setenv("KVCUSTODY_SHRED_KEYS_PATH", str(deployment.shred))
    assert json.loads(cli("keys", "tree", "--json")[1])["subjects"]
    monkeypatch.setenv("KVCUSTODY_SHRED_KEYS_PATH", "none.keys")
    found = json.loads(cli("keys", "tree", "--json")[1])
    assert found["epochs"] and not found["subjects"] and not Path("none.keys").exists()
    code, said = cli("keys", "tree", "--shred-keys", "none.keys")
    assert code == 2 and "no such file" in said


def test_rewrap_moves_shred_keys_too(deployment: Deployment, tmp_path: Path) -> None:
    """First they, so that a call that was cut short between the two can be made again."""
    old, new = tmp_path / "root.key", tmp_path / "new.key"
    secret = bytes(deployment.keys.secret(deployment.bob.id).view())
    assert cli("keys", "init", new)[0] == 0
    living = read_shred_keys(deployment.shred)
    words = (
        "keys",
        "rewrap",
        deployment.keyring,
        "--from",
        old,
        "--to",
        new,
        "--shred-keys",
        deployment.shred,
    )
    code, said = cli(*words, "--json")
    assert code == 0 and json.loads(said)["shred_keys"] == len(living) + 1
    assert read_shred_keys(deployment.shred) == living
    moved = ShredKeys.open(deployment.shred, RootKeyWrapping(read_root_key(new)), SystemClock())
    assert bytes(moved.secret(deployment.bob.id).view()) == secret
    moved.close()


def test_a_backup_is_made_with_its_date_and_forgotten_with_the_key_that_opens_it(tmp_path: Path) -> None:
    files = Deployment(tmp_path)
    named = ("--keyring", files.keyring, "--shred-keys", files.shred)
    now_us, folder = SystemClock().utc_us(), tmp_path / "backup"
    code, said = cli("keys", "backup", "--days", "30", "--to", folder, *named, "--json")
    assert code == 0 and json.loads(said)["folder"] == str(folder)
    for path in (files.keyring, files.shred):
        assert (folder / path.name).read_bytes() == path.read_bytes()
        assert (folder / path.name).stat().st_mode & 0o777 == 0o600
        until_us = KeyBackups(path).open_until(now_us, now_us)
        assert 0 <= until_us - now_us - 30 * 24 * HOUR < HOUR
    assert cli("keys", "backup", "--days", "30", "--to", folder, *named)[0] != 0, "no backup is written over"
    assert cli("keys", "backup", "--days", "60", *named)[0] == 0
    assert KeyBackups(files.shred).open_until(now_us, now_us + 40 * 24 * HOUR) > 0
    new = tmp_path / "new.key"
    assert cli("keys", "init", new)[0] == 0
    moved = (
        "keys",
        "rewrap",
        files.keyring,
        "--from",
        tmp_path / "root.key",
        "--to",
        new,
        "--shred-keys",
        files.shred,
    )
    assert cli(*moved)[0] == 0 and KeyBackups(files.keyring).open_until(now_us, now_us), "the old root key is there"
    assert cli(*moved, "--end-old")[0] == 0
    assert [KeyBackups(path).open_until(now_us, now_us) for path in (files.keyring, files.shred)] == [0, 0]


def test_a_backup_that_was_made_under_the_new_root_key_is_known_when_the_old_one_ends(tmp_path: Path) -> None:
    """Control: those that were made under the old one alone are not."""
    files, new, now_us = Deployment(tmp_path), tmp_path / "new.key", SystemClock().utc_us()
    named = ("--keyring", files.keyring, "--shred-keys", files.shred)
    moved = ("rewrap", files.keyring, "--from", tmp_path / "root.key", "--to", new)
    moved = ("keys", *moved, "--shred-keys", files.shred)
    assert cli("keys", "backup", "--days", "60", *named)[0] == 0
    assert cli("keys", "init", new)[0] == cli(*moved)[0] == 0
    assert cli("keys", "backup", "--days", "30", *named)[0] == 0
    assert cli(*moved, "--end-old")[0] == 0
    for path in (files.keyring, files.shred):
        assert 0 <= KeyBackups(path).open_until(now_us, now_us) - now_us - 30 * 24 * HOUR < HOUR


def test_no_epoch_is_destroyed_while_a_backup_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one would be in the backup, and its destruction would not know of that."""
    files, free = Deployment(tmp_path), []
    lock = files.keyring.with_name(files.keyring.name + ".lock")
    add, write = KeyBackups.add, keys.write_file

    def note() -> None:
        with lock.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                free.append(False)
            else:
                free.append(True)

    monkeypatch.setattr(KeyBackups, "add", lambda *told: (note(), add(*told)))
    monkeypatch.setattr(keys, "write_file", lambda *told, **how: (note(), write(*told, **how)))
    named = ("--keyring", files.keyring, "--shred-keys", files.shred)
    assert cli("keys", "backup", "--days", "30", "--to", tmp_path / "copies", *named)[0] == 0
    assert free == [False] * 4
    note()
    assert free[-1], "control: nobody holds it now"
