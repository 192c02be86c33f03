"""`make release`: every file is signed for, and a change, an addition or a loss of any file is found."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from standins.packaging_script import ROOT, packaging_script

CHANGELOG = "# Changelog\n\n## 0.2.0 (2026-12-01)\n\n- New.\n\n## 0.1.0, unreleased\n\n- Old.\n"


@pytest.fixture(scope="module")
def release() -> ModuleType:
    return packaging_script("release")


@pytest.fixture
def signed(release: ModuleType, tmp_path: Path) -> Path:
    """A folder with two files that a key in `tmp_path` has signed."""
    folder = tmp_path / "dist"
    folder.mkdir()
    release.new_key(tmp_path / "key.pem")
    files = {"a.whl": b"wheel", "SHA256SUMS": b"sums"}
    statement = release.provenance(files, "c0ffee", "2026-12-01T00:00:00+00:00")
    files[release.PROVENANCE] = release.envelope(statement, release._private(tmp_path / "key.pem"))
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def test_a_release_verifies_and_names_its_commit(release: ModuleType, signed: Path) -> None:
    statement = release.verify(signed, signed.parent / "key.pem.pub")
    assert {subject["name"] for subject in statement["subject"]} == {"a.whl", "SHA256SUMS"}
    source, lock = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert source["digest"] == {"gitCommit": "c0ffee"} and len(lock["digest"]["sha256"]) == 64


def _edited(folder: Path, release: ModuleType) -> None:
    (folder / "a.whl").write_bytes(b"Wheel")


def _added(folder: Path, release: ModuleType) -> None:
    (folder / "b.whl").write_bytes(b"another")


def _removed(folder: Path, release: ModuleType) -> None:
    (folder / "SHA256SUMS").unlink()


def _statement_edited(folder: Path, release: ModuleType) -> None:
    path = folder / release.PROVENANCE
    document = json.loads(path.read_bytes())
    payload = base64.b64decode(document["payload"]).replace(b"c0ffee", b"c0ffe0")
    path.write_text(json.dumps(document | {"payload": base64.b64encode(payload).decode()}))


def _signed_by_another(folder: Path, release: ModuleType) -> None:
    release.new_key(folder.parent / "other.pem")
    document = json.loads((folder / release.PROVENANCE).read_bytes())
    statement = json.loads(base64.b64decode(document["payload"]))
    key = release._private(folder.parent / "other.pem")
    (folder / release.PROVENANCE).write_bytes(release.envelope(statement, key))


def _unsigned(folder: Path, release: ModuleType) -> None:
    (folder / release.PROVENANCE).unlink()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_edited, "`a.whl` was changed"),
        (_added, "`b.whl` is not part of the release"),
        (_removed, "`SHA256SUMS` is missing"),
        (_statement_edited, "is not signed by"),
        (_signed_by_another, "is not signed by"),
        (_unsigned, "is missing or cannot be read"),
    ],
)
def test_every_change_of_a_release_is_found(
    release: ModuleType, signed: Path, change: Callable[[Path, ModuleType], None], message: str
) -> None:
    change(signed, release)
    with pytest.raises(release.ReleaseError, match=message):
        release.verify(signed, signed.parent / "key.pem.pub")


def test_a_key_is_its_owners_alone_and_never_replaced(release: ModuleType, tmp_path: Path) -> None:
    release.new_key(tmp_path / "key.pem")
    assert (tmp_path / "key.pem").stat().st_mode & 0o777 == 0o600
    with pytest.raises(release.ReleaseError, match="never replaced"):
        release.new_key(tmp_path / "key.pem")


def test_notes_are_the_versions_section(release: ModuleType) -> None:
    assert release.notes_of(CHANGELOG, "0.2.0") == "# kvcustody 0.2.0 (2026-12-01)\n\n- New.\n"
    with pytest.raises(release.ReleaseError, match=r"calls 0\.1\.0 unreleased"):
        release.notes_of(CHANGELOG, "0.1.0")
    with pytest.raises(release.ReleaseError, match=r"no section `## 0\.3\.0`"):
        release.notes_of(CHANGELOG, "0.3.0")


def test_a_checkout_with_changes_is_refused(release: ModuleType, tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path / "checkout"], check=True)
    (tmp_path / "checkout" / "new.py").write_text("")
    release.new_key(tmp_path / "key.pem")
    with pytest.raises(release.ReleaseError, match="commit or stash"):
        release.make(tmp_path / "dist", tmp_path / "key.pem", tmp_path / "checkout")
    with pytest.raises(release.ReleaseError, match="make one with --new-key"):
        release.make(tmp_path / "dist", tmp_path / "no.pem", tmp_path / "checkout")


@pytest.mark.system("`make release` breaks, or signs what cannot be verified")
def test_a_release_of_this_commit_is_made_and_verified(release: ModuleType, tmp_path: Path) -> None:
    """From a clone whose changelog dates the version."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
    changelog = (clone / "CHANGELOG.md").read_text()
    (clone / "CHANGELOG.md").write_text(changelog.replace(", unreleased", " (2026-12-01)", 1))
    git = ["git", "-C", clone, "-c", "user.name=Tests", "-c", "user.email=tests@example.invalid"]
    subprocess.run([*git, "commit", "-qam", "A date"], check=True)
    release.new_key(tmp_path / "key.pem")
    done = subprocess.run(
        [sys.executable, clone / "packaging" / "release.py", "--key", tmp_path / "key.pem", tmp_path / "out"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    statement = release.verify(tmp_path / "out", tmp_path / "key.pem.pub")
    assert len(statement["subject"]) == 6 and {"NOTES.md", "SHA256SUMS"} <= {
        subject["name"] for subject in statement["subject"]
    }
    shutil.rmtree(clone)
