"""The secret under scope tokens: a 0600 file of its own, made at first start, shared by door and engine.

It is not derived from the root key. The process that faces the network issues tokens, and it must never hold a secret
that opens every tenant's keys. Whoever reads this file can claim to be any tenant, but cannot compute a block key.

- Processes that race to make the file all get the same secret: the file appears whole, under its name, or not at all.
- A file is read only if it obeys the rules of a root key file: a regular file of 32 bytes, ours, 0600, behind no
  symbolic link.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

from kvcustody.errors import KeyringError
from kvcustody.files import write_file
from kvcustody.governance.identity import tlv
from kvcustody.governance.keys.locked_buffer import KeyBuffer, derive
from kvcustody.governance.keys.root_key_wrapping import read_root_key


def open_scope_key(path: Path) -> KeyBuffer:
    """Open the secret in `path`, and create it first if it is missing; the caller wipes it. Raises `KeyringError`."""
    try:
        if not os.path.lexists(path):
            _create(path)
        return read_root_key(path)
    except KeyringError as error:
        problem, advice = error.operands["problem"], error.operands["advice"]
        raise KeyringError(
            f"scope token key `{path}`: {problem}; {advice}", path=path, problem=problem, advice=advice
        ) from None


def _create(path: Path) -> None:
    """Put a fresh secret under `path` in one step, unless somebody else is first."""
    try:
        with contextlib.suppress(FileExistsError), KeyBuffer.random() as secret:
            write_file(path, secret.view(), exclusive=True)
    except OSError as error:
        raise KeyringError(
            f"cannot create `{path}`",
            problem=f"cannot be created ({error.strerror})",
            advice="choose a directory on a local disk",
        ) from None


def keyed_state(secret: KeyBuffer, use: str, size: int) -> hashlib.blake2b:
    """A BLAKE2b state of `size` bytes, under a key of its own for each use; like a domain's state, it is the key."""
    info = tlv.encode("kvcustody/scope-token", 1, {1: use})
    with KeyBuffer() as key:
        derive(secret, salt=b"kvcustody/v1/scope-token", info=info, into=key)
        return hashlib.blake2b(key=key.view(), digest_size=size, person=b"kvc-scope-token")
