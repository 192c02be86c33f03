"""The wrapping port W1-W4 over key files and the environment: bad input, bound wraps, signatures."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from kvcustody.errors import KeyringError
from kvcustody.governance.identity.domain_spec import KeyOwner, group_owner, tenant_owner
from kvcustody.governance.keys.locked_buffer import KeyBuffer
from kvcustody.governance.keys.root_key_wrapping import (
    ROOT_KEY_VARIABLE,
    WRAPPED_BYTES,
    RootKeyWrapping,
    create_root_key,
    open_wrapping,
    read_root_key,
)

ACME = tenant_owner("idp", "acme")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "root.key"


def _write(path: Path, content: bytes, mode: int = 0o600) -> None:
    path.write_bytes(content)
    path.chmod(mode)


def _link(path: Path) -> None:
    _write(path.with_name("real.key"), bytes(32))
    path.symlink_to(path.with_name("real.key"))


BAD_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "does not exist; create it"),
    "world-readable": (lambda path: _write(path, bytes(32), 0o644), "has mode `0644`, open to others"),
    "group-readable": (lambda path: _write(path, bytes(32), 0o640), "has mode `0640`"),
    "group-writable": (lambda path: _write(path, bytes(32), 0o620), "has mode `0620`"),
    "empty": (lambda path: _write(path, b""), "has `0` bytes, not 32"),
    "short": (lambda path: _write(path, bytes(31)), "has `31` bytes"),
    "long": (lambda path: _write(path, bytes(33)), "has `33` bytes"),
    "hexadecimal": (lambda path: _write(path, b"00" * 32 + b"\n"), "has `65` bytes"),
    "symbolic-link": (_link, "is a symbolic link"),
    "directory": (lambda path: path.mkdir(mode=0o700), "is not a regular file"),
    "pipe": (lambda path: os.mkfifo(path, 0o600), "is not a regular file"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "expected"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_a_bad_key_file_is_refused_with_one_line(path: Path, make: Callable[[Path], object], expected: str) -> None:
    make(path)
    with pytest.raises(KeyringError) as caught:
        open_wrapping("file", path)
    assert expected in str(caught.value) and str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_another_users_key_file_is_refused(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    _write(path, bytes(32))
    os.chown(path, 12_345, -1)
    with pytest.raises(KeyringError, match="belongs to user `12345`"):
        read_root_key(path)


def test_a_generated_key_is_private_and_is_made_once(path: Path) -> None:
    os.umask(os.umask(0))  # whatever the mask is, the file is 0600
    first = open_wrapping("generated", path)
    assert path.stat().st_mode & 0o777 == 0o600 and path.stat().st_size == 32
    assert open_wrapping("generated", path).verification_key() == first.verification_key()
    with pytest.raises(KeyringError, match="already exists"):
        create_root_key(path)
    with pytest.raises(KeyringError, match="cannot be created"):
        create_root_key(path.parent / "absent" / "root.key")


def test_a_generated_key_never_follows_a_dangling_link(path: Path) -> None:
    path.symlink_to(path.with_name("elsewhere"))
    with pytest.raises(KeyringError, match="is a symbolic link"):
        open_wrapping("generated", path)
    assert not path.with_name("elsewhere").exists()


@pytest.mark.parametrize("text", [None, "", "x", "00" * 32, base64.b64encode(bytes(31)).decode(), "é" * 44])
def test_a_bad_environment_key_is_refused(path: Path, text: str | None) -> None:
    environment = {} if text is None else {ROOT_KEY_VARIABLE: text}
    with pytest.raises(KeyringError) as caught:
        open_wrapping("environment", path, environment=environment)
    assert not text or text not in str(caught.value)


def test_an_environment_key_is_taken_out_of_the_environment(path: Path) -> None:
    environment = {ROOT_KEY_VARIABLE: base64.b64encode(os.urandom(32)).decode()}
    strict = dict(environment)
    open_wrapping("environment", path, environment=environment)
    assert environment == {}
    with pytest.raises(KeyringError, match="refused in the strict profile"):
        open_wrapping("environment", path, strict=True, environment=strict)


def test_a_wrap_opens_only_under_its_root_owner_and_epoch(path: Path) -> None:
    port, other = open_wrapping("generated", path), RootKeyWrapping(KeyBuffer.random())
    with KeyBuffer.random() as secret:
        wrapped = port.wrap(secret, owner=ACME, epoch=1)
        assert len(wrapped) == WRAPPED_BYTES and bytes(secret.view()) not in wrapped
        with port.unwrap(wrapped, owner=ACME, epoch=1) as opened:
            assert opened.matches(secret)
        assert port.wrap(secret, owner=ACME, epoch=1) != wrapped
    wrong: list[tuple[RootKeyWrapping, KeyOwner, int]] = [
        (port, tenant_owner("idp", "globex"), 1),
        (port, tenant_owner("other", "acme"), 1),
        (port, group_owner("acme"), 1),
        (port, ACME, 2),
        (other, ACME, 1),
    ]
    for opener, owner, epoch in wrong:
        with pytest.raises(KeyringError, match="does not open under this root key"):
            opener.unwrap(wrapped, owner=owner, epoch=epoch)


def test_every_damaged_wrap_is_refused(path: Path) -> None:
    port = open_wrapping("generated", path)
    with KeyBuffer.random() as secret:
        wrapped = port.wrap(secret, owner=ACME, epoch=1)
    for at in range(len(wrapped)):
        damaged = wrapped[:at] + bytes([wrapped[at] ^ 1]) + wrapped[at + 1 :]
        with pytest.raises(KeyringError):
            port.unwrap(damaged, owner=ACME, epoch=1)
    for cut in (b"", wrapped[:-1], wrapped + b"\x00"):
        with pytest.raises(KeyringError, match="malformed"):
            port.unwrap(cut, owner=ACME, epoch=1)


def test_signatures_verify_under_the_published_key_alone(path: Path) -> None:
    port = open_wrapping("generated", path)
    signature = port.sign(b"certificate")
    Ed25519PublicKey.from_public_bytes(port.verification_key()).verify(signature, b"certificate")
    with pytest.raises(InvalidSignature):
        Ed25519PublicKey.from_public_bytes(port.verification_key()).verify(signature, b"another")


def test_a_destroyed_root_key_is_gone(path: Path) -> None:
    port = open_wrapping("generated", path)
    with KeyBuffer.random() as secret:
        wrapped = port.wrap(secret, owner=ACME, epoch=1)
    with path.open("rb") as held:
        port.destroy()
        assert held.read() == bytes(32)
    assert not path.exists()
    with pytest.raises(KeyringError):
        port.unwrap(wrapped, owner=ACME, epoch=1)
    port.destroy()
