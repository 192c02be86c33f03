"""E4: no key and nonce twice over restarts, forks, threads, a clock that steps and folders that are put back.

Of 10^7 seals without one, the rate is below 3 x 10^-7 with 95 % confidence.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from standins.redteam.sealing_lives import lives


def in_a_process(folder: Path, restarts: int, seals: int, *, counts: bool = False) -> tuple[int, int]:
    """`lives`, in a process that has no threads of others to fork."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(lives, (folder, restarts, seals), {"counts": counts})


@pytest.mark.parametrize(("restarts", "seals"), [(10, 4_000), pytest.param(1_000, 10_000_000, marks=pytest.mark.soak)])
def test_no_key_and_nonce_are_used_twice(tmp_path: Path, restarts: int, seals: int) -> None:
    made, twice = in_a_process(tmp_path, restarts, seals)
    assert made > seals * 0.99 and twice == 0


def test_a_counter_that_is_kept_in_a_file_repeats(tmp_path: Path) -> None:
    """The control, the same lives: forked children and folders that were put back count again from where they were."""
    made, twice = in_a_process(tmp_path, 10, 4_000, counts=True)
    assert made > 3_960 and twice > 400
