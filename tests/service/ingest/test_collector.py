"""A process that serves collects seldom, and what it was afterwards again."""

from __future__ import annotations

import subprocess
import sys

IMPORTS = "import gc; from kvcustody.governance.service.gc_tuning import gc_seldom\n"


def run_alone(program: str) -> None:
    """In a process of its own, whose heap is small: a collection of this one's takes seconds."""
    subprocess.run([sys.executable, "-c", IMPORTS + program], check=True)


def test_the_collector_is_as_it_was_afterwards() -> None:
    run_alone(
        """
gc.set_threshold(700, 10, 10)
with gc_seldom():
    assert gc.get_freeze_count() > 0 and gc.get_threshold()[0] > 700
    assert gc.isenabled()
assert gc.get_threshold() == (700, 10, 10) and gc.get_freeze_count() == 0
"""
    )


def test_a_process_that_froze_its_objects_itself_keeps_them_so() -> None:
    run_alone(
        """
gc.freeze()
with gc_seldom():
    pass
assert gc.get_freeze_count() > 0
"""
    )
