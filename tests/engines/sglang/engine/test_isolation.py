"""Two tenants, the same prompt: own hits full, foreign none; deadlines, erasure, forged identities, zero slots."""

from __future__ import annotations

import time

from standins.engines.vllm.deployment import BRIEF_IDLE_SECONDS

PROMPT = [16 + (7 * at) % 400 for at in range(300)]


def prompt(number: int, tokens: int = 120) -> list[int]:
    return [16 + (number * 31 + at * (number % 7 + 3)) % 480 for at in range(tokens)]


def test_own_hits_are_full_and_foreign_ones_are_none(governed):
    engine, site = governed, governed.deployment
    first = engine.run(PROMPT, site.token("acme"))
    assert first.cached_tokens == 0
    again = engine.run(PROMPT, site.token("acme"))
    assert again.cached_tokens == len(PROMPT) - 1
    foreign = engine.run(PROMPT, site.token("beta"))
    assert foreign.cached_tokens == 0
    other = engine.run(PROMPT, site.token("acme", "another"))
    assert other.cached_tokens == 0, "another subject of the same tenant"
    assert first.tokens == again.tokens == foreign.tokens == other.tokens
    assert engine.probe("check") == [] and engine.probe("scan") == []


def test_no_identity_reads_nothing_and_leaves_nothing(governed):
    engine, site = governed, governed.deployment
    tokens = prompt(900)
    engine.run(tokens, site.token("gamma"))
    spent = site.token("gamma")
    assert engine.run(tokens, spent).cached_tokens == len(tokens) - 1
    forged = site.token("gamma")[:-4] + "AAAA"
    for said in (None, "gamma", forged, spent):
        assert engine.run(tokens, said).cached_tokens == 0, said
        assert engine.run(tokens, said).cached_tokens == 0, said
    anonymous = prompt(901)
    engine.run(anonymous)
    assert engine.run(anonymous, site.token("gamma")).cached_tokens == 0


def test_extra_key_only_narrows(governed):
    engine, site = governed, governed.deployment
    tokens = prompt(902)
    engine.run(tokens, site.token("delta"))
    assert engine.run(tokens, site.token("delta"), extra_key="mine").cached_tokens == 0
    assert engine.run(tokens, site.token("delta"), extra_key="mine").cached_tokens == len(tokens) - 1
    assert engine.run(tokens, site.token("epsilon"), extra_key="mine").cached_tokens == 0


def test_a_deadline_passes_in_an_idle_engine(governed):
    engine, site = governed, governed.deployment
    tokens = prompt(903)
    engine.run(tokens, site.token("brief"))
    assert engine.run(tokens, site.token("brief")).cached_tokens == len(tokens) - 1
    before = engine.probe("stats")["by_state"]["cached"]
    time.sleep(BRIEF_IDLE_SECONDS + 0.5)
    assert engine.probe("stats")["by_state"]["cached"] < before, "ended without any request"
    assert engine.probe("free")["soiled"] == 0
    assert engine.run(tokens, site.token("brief")).cached_tokens == 0


def test_an_erased_subject_is_gone_and_its_slots_are_zero(governed):
    engine, site = governed, governed.deployment
    tokens = prompt(904)
    engine.run(tokens, site.token("zeta", "erased"))
    engine.run(tokens, site.token("zeta", "kept"))
    answer = engine.probe("erase", tenant="zeta", subject="erased")
    assert answer["blocks"] >= len(tokens) and answer["remaining"] == 0
    assert engine.run(tokens, site.token("zeta", "kept")).cached_tokens == len(tokens) - 1
    assert engine.run(tokens, site.token("zeta", "erased")).cached_tokens == 0
    assert engine.probe("free")["soiled"] == 0
    assert engine.probe("check") == [] and engine.probe("scan") == []


def test_restricted_content_is_never_kept(governed):
    engine, site = governed, governed.deployment
    tokens = prompt(905)
    engine.run(tokens, site.token("secret"))
    assert engine.run(tokens, site.token("secret")).cached_tokens == 0


def test_every_slot_is_zero_before_it_is_written(governed):
    engine, site = governed, governed.deployment
    for number in range(90):
        engine.run(prompt(number, 110), site.token(f"tenant-{number % 3}"))
    written = engine.probe("written")
    assert written["slots"] > 9000 and written["soiled"] == 0
    assert engine.probe("free")["soiled"] == 0
    assert engine.probe("check") == [] and engine.probe("scan") == []


def test_after_new_weights_nothing_from_before_is_found_though_the_cache_was_not_flushed(governed):
    engine, site = governed, governed.deployment
    tokens = prompt(990)
    engine.run(tokens, site.token("kappa"))
    assert engine.run(tokens, site.token("kappa")).cached_tokens == len(tokens) - 1, "control: it is cached"
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    inner = engine.engine
    update = UpdateWeightFromDiskReqInput(model_path=inner.server_args.model_path, flush_cache=False)
    success, message, *_ = inner.loop.run_until_complete(inner.tokenizer_manager.update_weights_from_disk(update, None))
    assert success, message
    assert engine.run(tokens, site.token("kappa")).cached_tokens == 0
    assert engine.run(tokens, site.token("kappa")).cached_tokens == len(tokens) - 1
    assert engine.probe("check") == []
