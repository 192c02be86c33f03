"""Custody and the recording of graphs exclude each other, from whatever thread: ticks, erasures, classic caches.

There is no device here, so the engine's own capture routine runs over a stand-in for the recording itself; who may act
while it lasts is what is under test.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
from transformers.generation.continuous_batching import model_runner

from kvcustody.errors import ConfigError
from kvcustody.integrations.transformers.batching import manager as manager_module
from kvcustody.integrations.transformers.batching.thread_turn import Turn
from kvcustody.integrations.transformers.classic.custodian import SlabMemory, SlabSize
from kvcustody.kernels.streams import capturing, outside_captures
from standins.engines.transformers.continuous_world import governed

WAIT_SECONDS = 0.2
CPU = torch.device("cpu")


class Meanwhile:
    """Work of another thread, and whether it was done while a recording lasted."""

    def __init__(self, work):
        self.done = threading.Event()
        self.early = None
        self._thread = threading.Thread(target=lambda: (work(), self.done.set()))

    def start(self):
        self._thread.start()
        self.early = self.done.wait(WAIT_SECONDS)

    def join(self):
        self._thread.join(10)
        assert self.done.is_set()


def a_tick(engine):
    return engine.batching.tick


def an_erasure(engine):
    def erase():
        with engine.batching.custody.turn:
            engine.batching.custody.governor.step()

    return erase


def a_classic_scrub(engine):
    memory = SlabMemory(4)
    memory.bind(np.arange(4), [SlabSize(4, CPU, CPU)])
    return lambda: memory.scrub(0, np.arange(4), 1.0)


ACTS = [a_tick, an_erasure, a_classic_scrub]


def record_a_graph(engine, monkeypatch, during):
    """The engine's own `_capture_graph`, with `during` in place of what a device would record."""
    runner = engine.batching.manager.batch_processor.model_runner

    @contextmanager
    def recording(*_, **__):
        during()
        yield

    monkeypatch.setattr(model_runner, "memory_pool_context", lambda pool: nullcontext())
    monkeypatch.setattr(model_runner, "create_accelerator_graph", object)
    monkeypatch.setattr(model_runner, "accelerator_graph_capture_context", recording)
    monkeypatch.setattr(runner.inputs_and_outputs, "set_graph", lambda graph: None)
    runner._capture_graph(lambda: None, None)


@pytest.mark.parametrize("act", ACTS)
def test_nothing_acts_while_the_engine_records_a_graph(act, monkeypatch):
    with governed(tick_seconds=None) as engine:
        other = Meanwhile(act(engine))
        record_a_graph(engine, monkeypatch, other.start)
        other.join()
    assert not other.early


@pytest.mark.parametrize("act", ACTS)
def test_positive_control_a_recording_that_nobody_announces_does_not_hold_it_back(act, monkeypatch):
    monkeypatch.setattr(manager_module, "_announced", lambda capture: capture)
    with governed(tick_seconds=None) as engine:
        other = Meanwhile(act(engine))
        record_a_graph(engine, monkeypatch, other.start)
        other.join()
    assert other.early, "void: it waits for something else"


def test_the_warm_up_is_nobodys_turn(monkeypatch):
    """Dummy batches write the cache too: no tick begins before they have ended."""
    with governed(tick_seconds=None) as engine:
        manager = engine.batching.manager
        other = Meanwhile(engine.batching.tick)
        monkeypatch.setattr(manager.batch_processor, "warmup", lambda model: other.start())
        manager.warmup()
        other.join()
    assert not other.early


def test_a_recording_waits_for_a_turn_that_has_begun():
    turn, began, ended = Turn(), threading.Event(), threading.Event()

    def take():
        with turn:
            began.set()
            ended.wait(10)

    thread = threading.Thread(target=take)
    thread.start()
    began.wait(10)
    with pytest.raises(TimeoutError):
        _capture_within(WAIT_SECONDS)
    ended.set()
    thread.join(10)
    _capture_within(10)


def _capture_within(seconds):
    if not outside_captures().acquire(timeout=seconds):  # type: ignore[attr-defined]
        raise TimeoutError
    try:
        with capturing():
            pass
    finally:
        outside_captures().release()  # type: ignore[attr-defined]


def test_an_engine_that_records_elsewhere_is_refused(monkeypatch):
    with governed(tick_seconds=None) as engine:
        manager = engine.batching.manager
        monkeypatch.setattr(manager, "batch_processor", object())
        monkeypatch.setattr(manager.continuous_batching_config, "use_cuda_graph", (True, True))
        with pytest.raises(ConfigError, match="use_cuda_graph=False"):
            manager.guard_captures(engine.batching.custody.turn)
