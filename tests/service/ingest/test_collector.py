"""A process that serves collects seldom, and what it was afterwards again."""

from __future__ import annotations

import gc

import pytest

from kvcustody.governance.service.gc_tuning import gc_seldom


@pytest.mark.system("the garbage collector stays off after a batch")
def test_the_collector_is_as_it_was_afterwards() -> None:
    before = gc.get_threshold()
    with gc_seldom():
        assert gc.get_freeze_count() > 0 and gc.get_threshold()[0] > before[0]
        assert gc.isenabled()
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0
