"""Bit for bit what a hit on the device gives: the scores of a request whose prefix was away in a tier."""

from __future__ import annotations

import pytest

from standins.engines.sglang.sglang_tiers import WHOLE, clean, displace, prompt, tiered

ANSWER, LIKELIEST = 6, 8


def _ask(engine, tokens):
    """The scores of every place that is computed behind `WHOLE` cached tokens: of the prompt and of the answer."""
    answer = engine.run(
        tokens,
        engine.deployment.token("acme"),
        ANSWER,
        return_logprob=True,
        logprob_start_len=WHOLE,  # no hit is longer, on the device or in a tier: both compute the same places
        top_logprobs_num=LIKELIEST,
    )
    assert answer.cached_tokens == WHOLE, "the same is computed everywhere"
    scores = answer.scores
    assert scores is not None
    assert len(scores["input_token_logprobs"]) == len(tokens) - WHOLE
    assert [len(place) for place in scores["output_top_logprobs"]] == [LIKELIEST] * ANSWER
    return scores


def _restored(engine):
    return {name: one["restored"] for name, one in engine.probe("tiers").items()}


@pytest.mark.parametrize("page_size", [1, 16])
def test_scores_are_the_same_bits_after_a_restore(start, new_deployment, page_size):
    engine, site, _ = tiered(start, new_deployment, "host nvme", page_size=page_size)
    mine = prompt(40)
    engine.run(mine, site.token("acme"))
    on_device = _ask(engine, mine)
    assert sum(_restored(engine).values()) == 0 and _ask(engine, mine) == on_device

    for tier in ("host", "nvme"):
        displace(engine)
        if tier == "nvme":
            assert engine.probe("to_files") > 0
        before = _restored(engine)
        assert _ask(engine, mine) == on_device, tier
        after = _restored(engine)
        assert {name: after[name] - before[name] for name in after if after[name] != before[name]} == {
            tier: WHOLE // 16
        }
    clean(engine)

    # Controls: what comes back a little otherwise is told by these scores, be it marred on its way out or in.
    for how in ("opened", "places"):
        displace(engine)
        engine.probe("mar", how=how)
        assert _ask(engine, mine) != on_device, how
        engine.probe("mar", how="")
    displace(engine)
    assert _ask(engine, mine) == on_device, "its copies are still what they were"
    other = prompt(41)
    engine.run(other, site.token("acme"))
    on_device = _ask(engine, other)
    engine.probe("mar", how="sealed")
    displace(engine)
    engine.probe("mar", how="")
    assert _ask(engine, other) != on_device, "sealed"
