"""The comparison with vLLM makes leaves in the batches of the ledger's writer, and only then."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from kvcustody.audit.kinds import BlocksAttached, Event
from kvcustody.audit.write.event_writer import WriterSettings
from kvcustody.governance.settings import Settings

BATCH = WriterSettings().batch
WAIT_SECONDS = Settings().ledger_batch_ms / 1000


@pytest.fixture(scope="module")
def governed() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "harness" / "governed.py"
    spec = importlib.util.spec_from_file_location("benchmarks_governed", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def events(count: int) -> list[Event]:
    return [BlocksAttached(1_000 + number, number, "acme", ()) for number in range(count)]


def test_leaves_wait_for_a_batch(governed: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(governed, "monotonic", lambda: now)
    maker = governed.LeafMaker()
    for _ in range(3):
        maker.submit(events(BATCH // 3))
        assert maker.drain() == 0
    maker.submit(events(BATCH))
    assert maker.drain() == BATCH // 3 * 3 + BATCH, "all that waits is one batch"

    maker.submit(events(1))
    assert maker.drain() == 0
    now += WAIT_SECONDS * 0.9
    maker.submit(events(1))
    assert maker.drain() == 0
    now += WAIT_SECONDS * 0.2
    assert maker.drain() == 2, "the first has waited as long as the writer lets it"
    now += WAIT_SECONDS * 2
    assert maker.drain() == 0
    maker.submit(events(1))
    assert maker.drain() == 0, "a wait begins with the first event, not with the last batch"
    assert maker.drain(whole=True) == 1
