from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from standins.engines.vllm.scheduler_rig import Rig


@pytest.fixture
def rig(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rig]]:
    """Makes rigs, whose timers end with the test."""
    from standins.engines.vllm.scheduler_rig import Rig  # needs vLLM, which only the adapter's environment has

    with ExitStack() as stack:

        def make(**named: object) -> Rig:
            rig = Rig(model, monkeypatch, **named)
            if rig.worker is not None:
                stack.callback(rig.side.timer.close)
            return rig

        yield make
