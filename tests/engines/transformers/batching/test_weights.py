"""K/V of weights that were changed under a running engine is reused by nobody."""

from __future__ import annotations

import pytest
import torch

from kvcustody.integrations.transformers.batching import custody
from standins.engines.transformers.continuous_world import Governed, governed, person, prompt

PROMPT = prompt(33)
HIT = 32


def again(engine: Governed) -> int:
    """Tokens that a second request of the same prompt reuses."""
    name = engine.submit(person(), PROMPT)
    engine.run()
    return engine.reused[name]


def overwrite(engine: Governed) -> None:
    """Other weights, in the same memory."""
    with torch.no_grad():
        engine.manager.model.model.layers[0].self_attn.k_proj.weight.mul_(2)


def test_parameters_that_were_written_in_place_are_other_weights() -> None:
    with governed() as engine:
        again(engine)
        assert again(engine) == HIT, "control: the same weights"
        overwrite(engine)
        assert [again(engine), again(engine)] == [0, HIT]


def test_parameters_that_were_replaced_are_other_weights() -> None:
    with governed() as engine:
        again(engine)
        layer = engine.manager.model.model.layers[0].self_attn
        layer.k_proj.weight = torch.nn.Parameter(layer.k_proj.weight.detach() * 2)
        assert [again(engine), again(engine)] == [0, HIT]


def test_positive_control_without_the_look_at_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custody, "_writes", lambda parameters: 0)
    with governed() as engine:
        again(engine)
        overwrite(engine)
        assert again(engine) == HIT


def test_a_write_that_no_count_shows_is_told_by_whoever_made_it() -> None:
    with governed() as engine:
        again(engine)
        engine.manager.model.model.layers[0].self_attn.k_proj.weight.data.mul_(2)
        assert again(engine) == HIT, "the limit that is declared"
        engine.batching.weights_changed()
        assert again(engine) == 0
