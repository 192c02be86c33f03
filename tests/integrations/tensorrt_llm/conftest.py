"""The connector over a stand-in engine: nothing here needs TensorRT-LLM, and nothing here was run on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from standins.integrations.trtllm_world import TrtllmWorld


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrtllmWorld]:
    made = TrtllmWorld(tmp_path, monkeypatch)
    yield made
    made.close()
