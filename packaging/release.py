"""Make a release here, without publishing it: two equal builds, notes, provenance and a signature (`make release`).

    python packaging/release.py --new-key release.pem              # once; keep the file, hand out release.pem.pub
    python packaging/release.py --key release.pem [FOLDER]         # `dist/` unless a folder is named
    python packaging/release.py --verify release.pem.pub [FOLDER]  # needs `cryptography` alone

1. A checkout with changes that are not committed is refused: a release is made from a commit.
2. The commit is built twice. A file whose bytes differ ends the release, and nothing is written.
3. `NOTES.md` is the version's section of `CHANGELOG.md`.
4. `provenance.intoto.json` says what was built from which commit, with which lock: an in-toto statement with SLSA
   provenance (v1), in a DSSE envelope that an Ed25519 key signs. Its subjects are all other files with their SHA-256.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

ROOT = Path(__file__).resolve().parents[1]
NOTES, PROVENANCE = "NOTES.md", "provenance.intoto.json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
BUILD_TYPE = "https://kvcustody.invalid/build/python-distributions@1"


class ReleaseError(Exception):
    """A release that cannot be made, or does not verify; the message says what to do."""


def make(folder: Path, key: Path, root: Path = ROOT) -> list[Path]:
    """Make a release of the newest commit.

    Args:
        folder: receives the files; other files in it are refused.
        key: the file of an Ed25519 private key (PEM, PKCS 8).
        root: a checkout.

    Returns:
        The files, in the order of their names.

    Raises:
        ReleaseError: uncommitted changes, a folder with other files, a key of another kind, unequal builds, a version
            without notes.
    """
    signing_key = _private(key)
    if _git(root, "status", "--porcelain"):
        raise ReleaseError("files differ from the newest commit: commit or stash them first")
    if folder.exists() and any(folder.iterdir()):
        raise ReleaseError(f"`{folder}` has files in it: name an empty folder")
    files = _built_twice(root)
    files[NOTES] = notes_of((root / "CHANGELOG.md").read_text(encoding="utf-8"), version_of(files)).encode()
    statement = provenance(files, _git(root, "rev-parse", "HEAD"), _git(root, "log", "-1", "--format=%cI"), root)
    files[PROVENANCE] = envelope(statement, signing_key)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in sorted(files.items()):
        (folder / name).write_bytes(content)
    return [folder / name for name in sorted(files)]


def _built_twice(root: Path) -> dict[str, bytes]:
    """The files of a build by name, after a second build gave the same (rule 2)."""
    with tempfile.TemporaryDirectory() as place:
        builds = []
        for name in ("first", "second"):
            subprocess.run([sys.executable, root / "packaging" / "dist.py", Path(place) / name], check=True)  # noqa: S603
            builds.append({path.name: path.read_bytes() for path in (Path(place) / name).iterdir()})
    first, second = builds
    unequal = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
    if unequal:
        raise ReleaseError(f"two builds of this commit differ in {', '.join(unequal)}")
    return first


def version_of(files: dict[str, bytes]) -> str:
    """The version that the name of the wheel states."""
    [version] = {match[1] for name in files if (match := re.match(r"kvcustody-([^-]+)-.*\.whl$", name))}
    return version


def notes_of(changelog: str, version: str) -> str:
    """The section of a version; raises `ReleaseError` where the changelog has none, or calls it unreleased."""
    section = re.search(rf"^## ({re.escape(version)}\b[^\n]*)\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if section is None:
        raise ReleaseError(f"CHANGELOG.md has no section `## {version}`: write it")
    if "unreleased" in section[1]:
        raise ReleaseError(f"CHANGELOG.md calls {version} unreleased: put the date in its heading")
    return f"# kvcustody {section[1]}\n{section[2].rstrip()}\n"


def provenance(files: dict[str, bytes], commit: str, at: str, root: Path = ROOT) -> dict[str, Any]:
    """The in-toto statement about these files; `at`: the commit's time (ISO 8601)."""
    lock = hashlib.sha256((root / "requirements.lock").read_bytes()).hexdigest()
    subjects = [
        {"name": name, "digest": {"sha256": hashlib.sha256(content).hexdigest()}}
        for name, content in sorted(files.items())
    ]
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": subjects,
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"command": "make release"},
                "resolvedDependencies": [
                    {"name": "source", "digest": {"gitCommit": commit}},
                    {"name": "requirements.lock", "digest": {"sha256": lock}},
                ],
            },
            "runDetails": {
                "builder": {"id": "https://kvcustody.invalid/builder/maintainer", "version": _tools()},
                "metadata": {"startedOn": at},
            },
        },
    }


def envelope(statement: dict[str, Any], key: Ed25519PrivateKey) -> bytes:
    """A statement in a signed DSSE envelope, as JSON."""
    payload = json.dumps(statement, sort_keys=True, separators=(",", ":")).encode()
    signature = {
        "keyid": key_id(key.public_key()),
        "sig": base64.b64encode(key.sign(_signed_text(payload))).decode(),
    }
    document = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": PAYLOAD_TYPE,
        "signatures": [signature],
    }
    return json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"


def _signed_text(payload: bytes) -> bytes:
    """What a DSSE signature covers: the type and the payload, each with its length."""
    kind = PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def key_id(key: Ed25519PublicKey) -> str:
    """The first 16 hexadecimal digits of the public key's SHA-256."""
    return hashlib.sha256(key.public_bytes(Encoding.Raw, PublicFormat.Raw)).hexdigest()[:16]


def verify(folder: Path, public: Path) -> dict[str, Any]:
    """Verify a release.

    Args:
        folder: its files and no others.
        public: the file of the Ed25519 public key (PEM) that was handed out.

    Returns:
        The statement that was signed.

    Raises:
        ReleaseError: names the file that is missing, changed or not signed for.
    """
    key = load_pem_public_key(public.read_bytes())
    if not isinstance(key, Ed25519PublicKey):
        raise ReleaseError(f"`{public}` is no Ed25519 public key")
    try:
        document = json.loads((folder / PROVENANCE).read_bytes())
        payload = base64.b64decode(document["payload"], validate=True)
        signatures = [base64.b64decode(one["sig"], validate=True) for one in document["signatures"]]
        is_ours = document["payloadType"] == PAYLOAD_TYPE
    except (OSError, ValueError, KeyError, TypeError):
        raise ReleaseError(f"`{folder / PROVENANCE}` is missing or cannot be read: fetch it again") from None
    if not is_ours or not any(_fits(key, signature, _signed_text(payload)) for signature in signatures):
        raise ReleaseError(f"`{PROVENANCE}` is not signed by `{public}`: trust nothing in this folder")
    statement: dict[str, Any] = json.loads(payload)
    signed = {subject["name"]: subject["digest"]["sha256"] for subject in statement["subject"]}
    there = {path.name for path in folder.iterdir()} - {PROVENANCE}
    for name in sorted(signed.keys() | there):
        if name not in signed:
            raise ReleaseError(f"`{name}` is not part of the release: remove it")
        if name not in there:
            raise ReleaseError(f"`{name}` is missing: fetch it")
        if hashlib.sha256((folder / name).read_bytes()).hexdigest() != signed[name]:
            raise ReleaseError(f"`{name}` was changed: fetch it again")
    return statement


def _fits(key: Ed25519PublicKey, signature: bytes, text: bytes) -> bool:
    try:
        key.verify(signature, text)
    except InvalidSignature:
        return False
    return True


def new_key(path: Path) -> Path:
    """Write a private key with mode 0600, and its public key beside it; returns the latter's file.

    Raises:
        ReleaseError: a file is there already.
    """
    public = path.with_name(f"{path.name}.pub")
    if path.exists() or public.exists():
        raise ReleaseError(f"`{path}` or `{public}` exists: a key is never replaced")
    key = Ed25519PrivateKey.generate()
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return public


def _private(path: Path) -> Ed25519PrivateKey:
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError):
        raise ReleaseError(f"`{path}` is no private key that can be read: make one with --new-key") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ReleaseError(f"`{path}` is no Ed25519 key: make one with --new-key")
    return key


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)  # noqa: S603, S607
    return done.stdout.strip()


def _tools() -> dict[str, str]:
    return {"python": ".".join(map(str, sys.version_info[:3]))}


def main() -> int:
    """Make or verify a release, or make a key; 2 where it is refused."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "dist", help="default: dist/")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--key", type=Path, help="sign with this private key")
    action.add_argument("--verify", type=Path, metavar="PUBLIC", help="verify with this public key")
    action.add_argument("--new-key", type=Path, metavar="FILE", help="write a new private key, and FILE.pub")
    options = parser.parse_args()
    try:
        if options.new_key:
            print(f"written: {options.new_key} (keep it), {new_key(options.new_key)} (hand it out)")
        elif options.verify:
            statement = verify(options.folder, options.verify)
            commit = statement["predicate"]["buildDefinition"]["resolvedDependencies"][0]["digest"]["gitCommit"]
            print(f"verified: {len(statement['subject'])} files of commit {commit}")
        else:
            for path in make(options.folder, options.key):
                print(f"{path.stat().st_size:>12,}  {path}")
    except ReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
