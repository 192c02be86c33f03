"""Key buffers K1-K4; red-team cases E5 and E7 as far as one machine shows them."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvcustody.errors import KeyringError
from kvcustody.governance.keys.locked_buffer import KeyBuffer, derive
from standins.governance.memory_scan import copies

HOLDER = """
import sys
from kvcustody.governance.keys.locked_buffer import KeyBuffer
buffer = KeyBuffer()
with open(sys.argv[1], "rb", buffering=0) as file:
    file.readinto(buffer.writable())
kept = bytes(buffer.view()) if sys.argv[2] == "copying" else None
for command in iter(sys.stdin.readline, ""):
    buffer.wipe()
    print("wiped", flush=True)
"""


def _copies_after_wipe(tmp_path: Path, how: str) -> int:
    """Copies of a secret in another process, counted from outside, after it wiped its buffer."""
    needle = os.urandom(32)
    secret = tmp_path / f"{how}.key"
    secret.write_bytes(needle)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(secret), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        process.stdout.readline()
        after = copies(process.pid, needle)
        process.stdin.close()
    return after


def test_no_copy_is_left_after_wipe(tmp_path: Path) -> None:
    """A scan of the whole process finds nothing; a build that made `bytes` of the key leaves a copy."""
    assert _copies_after_wipe(tmp_path, "in-place") == 0
    assert _copies_after_wipe(tmp_path, "copying") >= 1


def test_the_scan_finds_a_filled_buffer() -> None:
    with KeyBuffer.random() as buffer:
        needle = bytes(buffer.view())
        inside = copies(os.getpid(), needle)
    assert inside >= 2  # the scan sees the buffer and this test's own copy


def test_wiped_and_empty_buffers_refuse_to_be_read() -> None:
    buffer = KeyBuffer()
    with pytest.raises(KeyringError, match="wiped or was never filled"):
        buffer.view()
    with KeyBuffer.random() as filled:
        view = filled.view()
        assert view.readonly and bytes(view) != bytes(32)
    assert bytes(view) == bytes(32)
    with pytest.raises(KeyringError):
        filled.view()
    filled.wipe()


def test_a_buffer_has_no_printable_or_portable_content() -> None:
    with KeyBuffer.random() as buffer:
        content = bytes(buffer.view()).hex()
        assert content[:8] not in repr(buffer) + str(buffer) + f"{buffer}"
        for act in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(KeyringError):
                act(buffer)  # type: ignore[operator]


def test_derivation_is_hkdf_sha256() -> None:
    """RFC 5869's own case, as far as 32 bytes, and the library's result for random input."""
    with KeyBuffer(22) as secret, KeyBuffer() as key:
        secret.writable()[:] = b"\x0b" * 22
        derive(secret, salt=bytes(range(13)), info=bytes(range(0xF0, 0xFA)), into=key)
        assert bytes(key.view()).hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"
    with KeyBuffer.random() as secret, KeyBuffer() as key:
        derive(secret, salt=b"", info=b"x" * 300, into=key)
        assert bytes(key.view()) == HKDF(SHA256(), 32, b"", b"x" * 300).derive(bytes(secret.view()))


def test_two_random_buffers_differ_and_compare_in_constant_time() -> None:
    with KeyBuffer.random() as one, KeyBuffer.random() as other:
        assert one.matches(one) and not one.matches(other)


def test_a_forked_child_sees_zeros_and_is_refused() -> None:
    """MADV_WIPEONFORK empties the page; the control, an ordinary buffer, is copied to the child."""
    with KeyBuffer.random() as buffer:
        plain = bytearray(buffer.view())
        view = buffer.view()
        child = os.fork()
        if child == 0:
            try:
                buffer.view()
            except KeyringError:
                os._exit(10 if bytes(view) == bytes(32) and plain != bytes(32) else 11)
            os._exit(12)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 10
        assert bytes(buffer.view()) == bytes(plain)


def test_the_page_is_kept_out_of_core_dumps() -> None:
    with KeyBuffer.random() as buffer:
        flags = _vm_flags(buffer._address)
    assert "dd" in flags and "wf" in flags
    assert ("lo" in flags) == buffer.locked


def _vm_flags(address: int) -> set[str]:
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(" ", 1)[0]
        if "-" in head and ":" not in head:
            low, high = (int(end, 16) for end in head.split("-"))
            inside = low <= address < high
        elif inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError("the buffer's mapping is not listed")
