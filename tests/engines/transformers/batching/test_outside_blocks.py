"""Every tensor that the engine makes for itself is sorted by what it holds: none is new, none is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from standins.device.allocations import compared, kept


def test_the_list_is_of_what_the_installed_release_makes() -> None:
    found = compared("transformers", "transformers")
    if found is None:
        pytest.skip("the list is of another release")
    new, gone = found
    assert not new, f"sort these in docs/build/outside-blocks.json by what they hold: {new}"
    assert not gone, "these are no longer made"


def test_positive_control_a_new_buffer_is_seen(tmp_path: Path) -> None:
    source = "class Runner:\n    def __init__(self):\n        self.leftover = torch.empty(4)\n        self.size = 4\n"
    (tmp_path / "runner.py").write_text(source, encoding="utf-8")
    assert kept(tmp_path, ["runner.py"]) == {"leftover": ["runner.py"]}
