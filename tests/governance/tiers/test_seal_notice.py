"""What a cache layer shows the engine beside it: that it seals, while it lives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvcustody.clock import SystemClock
from kvcustody.errors import ConfigError
from kvcustody.governance.keys.root_key_wrapping import open_wrapping
from kvcustody.governance.keys.shred_keys import ShredKeys
from kvcustody.governance.tiers.seal.seal_notice import SealNotice, is_sealing

PORT = 5555
_KEEPER = """
import sys, time
from pathlib import Path
from test_seal_notice import PORT, SealNotice, shred_keys
folder = Path(sys.argv[1])
notice = SealNotice(folder / "salts", shred_keys(folder), PORT)
print("there", flush=True)
time.sleep(60)
"""


def shred_keys(folder: Path, of: str = "") -> ShredKeys:
    return ShredKeys.open(folder / f"shred{of}", open_wrapping("generated", folder / f"root{of}.key"), SystemClock())


def test_a_notice_says_so_while_it_is_held(tmp_path: Path) -> None:
    salts, shred = tmp_path / "salts", shred_keys(tmp_path)
    assert not is_sealing(salts, shred, PORT), "nobody has said so"
    notice = SealNotice(salts, shred, PORT)
    assert is_sealing(salts, shred, PORT)
    assert not is_sealing(salts, shred, PORT + 1), "of another port"
    assert not is_sealing(salts, shred_keys(tmp_path, "2"), PORT), "of other keys"
    assert (tmp_path / f"salts.sealing-{PORT}").stat().st_mode & 0o077 == 0
    with pytest.raises(ConfigError, match="another process says"):
        SealNotice(salts, shred, PORT)
    assert is_sealing(salts, shred, PORT), "who was refused has not touched it"
    notice.close()
    assert not is_sealing(salts, shred, PORT), "the file is there, and says nothing"
    again = SealNotice(salts, shred, PORT)
    assert is_sealing(salts, shred, PORT)
    again.close()


@pytest.mark.parametrize("content", [b"", bytes(32), bytes(33)])
def test_a_file_that_somebody_without_the_keys_holds_says_nothing(tmp_path: Path, content: bytes) -> None:
    shred = shred_keys(tmp_path)
    theirs = SealNotice(tmp_path / "salts", shred_keys(tmp_path, "2"), PORT)
    (tmp_path / f"salts.sealing-{PORT}").write_bytes(content)
    assert not is_sealing(tmp_path / "salts", shred, PORT)
    theirs.close()


def test_it_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    shred = shred_keys(tmp_path)
    shred.of_subject(b"somebody")  # so that the file is there
    keeper = subprocess.Popen(
        [sys.executable, "-c", _KEEPER, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
    )
    assert keeper.stdout is not None and keeper.stdout.readline() == "there\n"
    assert is_sealing(tmp_path / "salts", shred, PORT)
    keeper.send_signal(signal.SIGKILL)
    keeper.wait(10)
    assert not is_sealing(tmp_path / "salts", shred, PORT)
