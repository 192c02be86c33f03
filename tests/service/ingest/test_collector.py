"""A process that serves collects seldom, and what it was afterwards again."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from kvcustody.governance.service.gc_tuning import gc_seldom


@pytest.fixture
def thawed() -> Iterator[None]:
    """The collector as a process finds it; afterwards as the tests have it."""
    gc.unfreeze()
    yield
    gc.freeze()


def test_the_collector_is_as_it_was_afterwards(thawed: None) -> None:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    try:
        with gc_seldom():
            assert gc.get_freeze_count() > 0 and gc.get_threshold()[0] > 700
            assert gc.isenabled()
        assert gc.get_threshold() == (700, 10, 10) and gc.get_freeze_count() == 0
    finally:
        gc.set_threshold(*before)


def test_a_process_that_froze_its_objects_itself_keeps_them_so(thawed: None) -> None:
    gc.freeze()
    with gc_seldom():
        pass
    assert gc.get_freeze_count() > 0
