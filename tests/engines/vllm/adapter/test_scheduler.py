"""The adapter in one process: vLLM's scheduler, its cache manager and real tensors, without a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import CapturingLogger

from kvcustody.audit.kinds import ResidencyOpened, ResidencyReleased
from kvcustody.errors import ConfigError
from kvcustody.governance.erasure.selector import Selector
from kvcustody.integrations.vllm.scheduler import scheduler_side
from kvcustody.integrations.vllm.scheduler.governed_request import governed_request
from standins.engines.vllm.scheduler_rig import BLOCK_TOKENS, Rig, prompt


def test_own_prefix_hits_and_a_foreign_one_misses(rig: Callable[..., Rig]) -> None:
    engine = rig()
    ids = prompt(100)
    assert engine.ask(ids, "alpha") == 0
    assert engine.ask(ids, "alpha") == 96
    assert engine.ask(ids, "beta") == 0
    assert engine.ask(ids, "beta") == 96
    engine.verify()


def test_without_a_valid_token_nothing_is_read_or_published(rig: Callable[..., Rig]) -> None:
    engine = rig()
    ids = prompt(100)
    engine.ask(ids, "alpha")
    used = engine.token("alpha")
    assert engine.ask(ids, None, salt=used) == 96  # positive control: the same token, valid
    for salt in (None, "forged", used):  # missing, forged, replayed
        assert engine.ask(ids, None, salt=salt) == 0
    due_us = engine.port.attempts.next_due_us()
    assert due_us == engine.port.next_due_us() is not None, "an idle engine is woken to put them on record"
    late = engine.token("alpha")
    engine.clock.advance(61_000_000)
    assert engine.ask(ids, None, salt=late) == 0
    assert engine.port.attempts.totals == {"missing": 1, "malformed": 1, "replayed": 1, "expired": 1}
    assert not engine.port.pool.indexed.any()
    engine.verify()


def test_the_engine_says_which_models_keys_it_makes(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    log = CapturingLogger()
    monkeypatch.setattr("kvcustody.integrations.vllm.model_identity._log", log)
    one = rig()
    request = one.add(prompt(40), "alpha")
    before = governed_request(request).model.digest.hex()
    one.side.reset()
    after = one.add(prompt(40), "alpha")
    one.run()
    said = [call.kwargs["model_digest"] for call in log.calls if call.args == ("model identity",)]
    assert said == [before, governed_request(after).model.digest.hex()]
    assert said[0] != said[1], "weights that were loaded again are another model"
    assert governed_request(request).model == governed_request(after).model, "one that waited runs on them, too"


def test_the_token_is_taken_from_the_request(rig: Callable[..., Rig]) -> None:
    one = rig()
    request = one.add(prompt(40), "alpha")
    assert request.cache_salt is None
    one.run()


def test_a_requests_trace_is_on_its_leaves(rig: Callable[..., Rig]) -> None:
    """vLLM's own trace headers, which reach the scheduler; what the door put beside the token comes before them."""
    engine = rig()
    own, door = "4bf92f3577b34da6a3ce929d0e0e4736", "ab" * 16
    headers = {"traceparent": f"00-{own}-00f067aa0ba902b7-01"}
    asked = [None, headers, {"traceparent": "x"}, headers]
    requests = [engine.add(prompt(40), "alpha", trace_headers=each, start=False) for each in asked]
    requests[3].kv_transfer_params = {scheduler_side.TRACE: door, "theirs": 1}
    for request in requests:
        engine.scheduler.add_request(request)
    assert requests[3].kv_transfer_params == {"theirs": 1}
    engine.run()
    engine.port.counts()  # what the adapter tells late is told by then
    opened = [event.trace for event in engine.ledger.events if isinstance(event, ResidencyOpened)]
    released = [event.trace for event in engine.ledger.events if isinstance(event, ResidencyReleased)]
    assert opened == ["", own, "", door] and sorted(released) == sorted(opened)


@pytest.mark.parametrize("early", [False, True])
def test_generated_tokens_are_keyed_too(rig: Callable[..., Rig], early: bool) -> None:
    """When their block enters the index or, where others may look for them, when it is full (block_hasher, H2, H3)."""
    engine = rig()
    engine.side.state.keys_early = early
    ids = prompt(20)
    request = engine.add(ids, "alpha", n=60)
    keys_of = {}
    while request.num_tokens < 80:
        engine.step()
        keys_of[request.num_tokens] = len(request.block_hashes)
    assert (keys_of[31], keys_of[32], keys_of[33]) == (1, 1 + early, 2)
    engine.run()
    whole = ids + engine.outputs[request.request_id]
    assert engine.ask([*whole, 5], "alpha") == 64
    assert engine.ask([*whole, 5], "beta") == 0
    engine.verify()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("defers", [False, True])
def test_churn(rig: Callable[..., Rig], defers: bool, windows: bool, asynchronous: bool) -> None:
    """Many requests over a pool that holds few: chunked prefill, preemption, eviction; every byte and book right."""
    engine = rig(blocks=36, windows=windows, asynchronous=asynchronous, defers=defers)
    plain = rig(blocks=400, windows=windows, asynchronous=asynchronous, governed=False)
    asked = []
    for turn in range(40):
        ids = prompt(30 + 11 * (turn % 9), seed=turn % 7)
        tenant = "alpha" if turn % 3 else "beta"
        asked.append((engine.add(ids, tenant, n=3 + 5 * (turn % 6)), plain.add(ids, "alpha", n=3 + 5 * (turn % 6))))
        if turn % 4 == 3:
            engine.step()
            plain.step()
    engine.run()
    plain.run()
    engine.verify()
    for ours, theirs in asked:
        assert engine.outputs[ours.request_id] == plain.outputs[theirs.request_id]
    assert plain.device.residue  # positive control: the runner does find what vLLM leaves behind


def test_preempted_requests_resume_with_their_own_blocks(rig: Callable[..., Rig]) -> None:
    one = rig(blocks=12)
    first, second = one.add(prompt(60, 1), n=50), one.add(prompt(60, 2), n=50)
    one.run()
    assert first.num_preemptions + second.num_preemptions
    assert [len(one.outputs[each.request_id]) for each in (first, second)] == [50, 50]
    one.verify()


def test_abort_while_running_and_while_waiting(rig: Callable[..., Rig]) -> None:
    from vllm.v1.request import RequestStatus

    engine = rig(asynchronous=True)
    running, waiting = engine.add(prompt(200), n=50), engine.add(prompt(100, 1), n=50)
    engine.step()
    engine.scheduler.finish_requests([running.request_id, waiting.request_id], RequestStatus.FINISHED_ABORTED)
    engine.run()
    for _ in range(3):
        engine.step()
    engine.verify()
    assert not engine.port.running


def test_caching_off(rig: Callable[..., Rig]) -> None:
    one = rig(caching=False, blocks=12)
    for turn in range(6):
        assert one.ask(prompt(60, turn % 2), "alpha", n=8) == 0
    one.verify()
    one.step()
    assert one.nonzero_blocks() == 0


def test_what_lapses_is_zeroed_without_a_request(rig: Callable[..., Rig]) -> None:
    engine = rig()
    engine.ask(prompt(100), "alpha")
    while engine.side.has_work():
        engine.step()
    assert engine.nonzero_blocks() == 6  # what is held: six whole blocks
    engine.clock.advance(61_000_000)
    assert engine.side.has_work()
    while engine.side.has_work():
        engine.step()
    assert engine.nonzero_blocks() == 0
    assert engine.ask(prompt(100), "alpha") == 0
    engine.verify()


def test_an_expired_prefix_is_not_served(rig: Callable[..., Rig]) -> None:
    one = rig()
    one.ask(prompt(100), "alpha")
    one.clock.advance(61_000_000)
    assert one.ask(prompt(100), "alpha") == 0
    one.verify()


def test_over_quota_waits_alone(rig: Callable[..., Rig]) -> None:
    """Alpha may have 10 blocks: its second request waits, beta's does not, and nobody is preempted."""
    engine = rig(blocks=40, alpha_cap=25)
    first = engine.add(prompt(90, 1), "alpha", n=40)
    second = engine.add(prompt(90, 2), "alpha", n=40)
    third = engine.add(prompt(90, 3), "beta", n=40)
    for _ in range(6):
        engine.step()
    assert not engine.outputs[second.request_id]
    assert engine.outputs[first.request_id] and engine.outputs[third.request_id]
    engine.run()
    assert len(engine.outputs[second.request_id]) == 40
    assert not any(each.num_preemptions for each in (first, second, third))
    engine.verify()


def test_what_can_never_fit_is_refused(rig: Callable[..., Rig]) -> None:
    one = rig(blocks=40, alpha_cap=25)
    request = one.add(prompt(150, 1), "alpha", n=100)
    one.run()
    assert one.side.control.has_outputs or request.request_id in one.reasons
    one.step()
    reason, text = one.reasons[request.request_id]
    assert str(reason) == "error"
    assert "blocks" in text


def test_too_long_a_run_is_ended(rig: Callable[..., Rig]) -> None:
    engine = rig(active="5s")
    request = engine.add(prompt(40), "alpha", n=200)
    for _ in range(4):
        engine.step()
    engine.clock.advance(6_000_000)
    engine.run()
    engine.step()
    assert str(engine.reasons[request.request_id][0]) == "abort"
    assert engine.reasons[request.request_id][1] == "kvcustody: active-max"
    engine.verify()


def test_erasure_ends_the_subject_alone(rig: Callable[..., Rig]) -> None:
    engine = rig()
    for tenant in ("alpha", "beta"):
        engine.ask(prompt(100), tenant)
    running = engine.add(prompt(120, 4), "alpha", n=100)
    engine.step()
    erased = engine.port.erase(Selector("alpha"))
    assert erased.aborted_requests == 1
    engine.run()
    engine.step()
    assert str(engine.reasons[running.request_id][0]) == "abort"
    assert engine.ask(prompt(100), "beta") == 96
    assert engine.ask(prompt(100), "alpha") == 0
    engine.verify()


def test_a_block_that_does_not_verify_is_withheld(rig: Callable[..., Rig]) -> None:
    engine = rig(blocks=20)
    engine.ask(prompt(100), "alpha")
    memory = engine.worker.worker_side.memory
    memory.stuck.add((0, 5))
    engine.clock.advance(61_000_000)
    while engine.side.has_work():
        engine.step()
    memory.stuck.clear()
    for turn in range(8):
        engine.ask(prompt(200, turn), "beta")
    assert engine.scheduler.kv_cache_manager.block_pool.blocks[5].ref_cnt == 1
    assert engine.scheduler.kv_cache_manager.reset_prefix_cache()
    assert not engine.port.pool.indexed.any()


def test_media_are_part_of_the_key(rig: Callable[..., Rig]) -> None:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    def image(name: str, offset: int) -> list[Any]:
        place = PlaceholderRange(offset=offset, length=8)
        return [MultiModalFeatureSpec(data=None, modality="image", identifier=name, mm_position=place)]

    from kvcustody.integrations.vllm.scheduler.extra_content import extras_of

    engine = rig()
    requests = [
        engine.add(prompt(100), "alpha", mm_features=image(name, at)) for name, at in (("a", 20), ("b", 20), ("a", 40))
    ]
    keys = []
    for request in requests:
        governed = engine.side.state.requests[request.request_id]
        keys.append(engine.port.look_up(governed.residency, lambda _: -1).keys)
    assert keys[0][0] == keys[1][0] == keys[2][0]  # the image begins in the second block, or the third
    assert keys[0][1] != keys[1][1] and keys[1][1] == keys[1][1]
    assert keys[0][1] != keys[2][1]
    assert len({each[-1] for each in keys}) == 3
    assert extras_of(engine.add(prompt(100), "alpha", mm_features=image("a", 98)), BLOCK_TOKENS).begin_after(6)


def test_what_acts_behind_governance_is_refused(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs
    from vllm.config import KVEventsConfig

    from kvcustody.governance.settings import load_settings
    from kvcustody.integrations.vllm.open_custody import refuse_ungoverned

    config = rig().config
    refuse_ungoverned(config, load_settings())
    config.model_config.enable_sleep_mode = True
    with pytest.raises(ConfigError, match="sleep mode"):
        refuse_ungoverned(config, load_settings())
    config.model_config.enable_sleep_mode = False
    config.model_config.enable_cumem_allocator = True
    with pytest.raises(ConfigError, match="release_kv_cache_memory"):
        refuse_ungoverned(config, load_settings())
    config.model_config.enable_cumem_allocator = False
    parallel = config.parallel_config
    parallel.distributed_executor_backend, parallel.world_size = "external_launcher", 2
    with pytest.raises(ConfigError, match="external launcher"):
        refuse_ungoverned(config, load_settings())
    parallel.distributed_executor_backend, parallel.world_size = "uni", 1
    monkeypatch.setattr(type(config), "use_v2_model_runner", True)
    config.cache_config.mamba_cache_mode = "align"
    with pytest.raises(ConfigError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        refuse_ungoverned(config, load_settings())
    monkeypatch.setattr(type(config), "use_v2_model_runner", False)
    refuse_ungoverned(config, load_settings())
    monkeypatch.setattr(envs, "VLLM_USE_RUST_FRONTEND", True, raising=False)  # vLLM keeps what it read once
    with pytest.raises(ConfigError, match="bypass the door"):
        refuse_ungoverned(config, load_settings())
    refuse_ungoverned(config, load_settings(windowed_token_seconds=3600))
    monkeypatch.setattr(envs, "VLLM_USE_RUST_FRONTEND", False, raising=False)
    refuse_ungoverned(config, load_settings())
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    with pytest.raises(ConfigError, match="token ids"):
        refuse_ungoverned(config, load_settings())
    refuse_ungoverned(config, load_settings(kv_events_tokens="published"))


def test_a_foreign_connector_is_refused(rig: Callable[..., Rig]) -> None:
    children = [
        {"kv_connector": "KVCustody", "kv_role": "kv_both"},
        {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": "x"},
        },
    ]
    with pytest.raises(ConfigError, match="ExampleConnector"):
        rig(connectors=children)


def test_a_connector_is_allowed_by_the_record_of_its_own_code(tmp_path: Path) -> None:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

    from kvcustody.integrations.vllm.conformance_record import digest_of, subject_of
    from kvcustody.integrations.vllm.foreign_connectors import refuse_foreign_connectors
    from kvcustody.testkit.conformance import ALL, CaseVerdict, ConformanceReport
    from kvcustody.testkit.conformance.report import record

    children = [{"kv_connector": "KVCustody"}, {"kv_connector": "ExampleConnector"}]
    transfer = KVTransferConfig("MultiConnector", kv_role="kv_both")
    transfer.kv_connector_extra_config = {"connectors": children}
    config: Any = SimpleNamespace(kv_transfer_config=transfer)
    report = ConformanceReport(
        "an engine with this tier", tuple(CaseVerdict(case.name, "pass", "", 0.1, 1) for case in ALL)
    )

    def allowed(tested: type) -> str:
        path = tmp_path / f"{tested.__name__}.json"
        path.write_bytes(record(report, subject_of(tested)))
        return f"ExampleConnector={path}#{digest_of(path.read_bytes())}"

    refuse_foreign_connectors(config, allowed(ExampleConnector))
    with pytest.raises(ConfigError, match="scheduler_rig:Rig`, here is"):
        refuse_foreign_connectors(config, allowed(Rig))
    with pytest.raises(ConfigError, match="is not `NAME=RECORD#DIGEST`"):
        refuse_foreign_connectors(config, "ExampleConnector")
    with pytest.raises(ConfigError, match="list the record"):
        refuse_foreign_connectors(config, "")
    children[1]["kv_connector"] = "LMCacheConnectorV1"
    with pytest.raises(ConfigError, match="without their salt"):
        refuse_foreign_connectors(config, allowed(ExampleConnector).replace("Example", "LMCache", 1))


def test_what_a_window_passes_in_a_step_is_nobodys_hit_in_that_step(model, monkeypatch):
    """A request lets a block go while another one looks it up: it ends, and the other computes."""
    rig = Rig(model, monkeypatch, windows=True, blocks=80)
    for decoded in range(1, 40):  # a window of two blocks passes its first one somewhere on the way
        shared = prompt(4 * BLOCK_TOKENS + 1, seed=decoded)
        first = rig.add(shared, n=60)
        while len(rig.outputs[first.request_id]) < decoded:
            rig.step()
        rig.add(shared, n=1)
        rig.run()
    rig.verify()


def test_a_hit_is_not_lost_with_another_copy_of_what_it_continues(model, monkeypatch):
    """A block is there twice, and a third request hits one of the two with what was computed after the other.

    To make room for it the other one goes: what continued that is hit, and reached through its twin, so it stays.
    """
    rig = Rig(model, monkeypatch, blocks=24, batched_tokens=512)
    whole = prompt(4 * BLOCK_TOKENS, seed=1)  # its last block is computed by everybody who asks for it
    rig.ask(whole, n=1)
    second = rig.add(whole, n=BLOCK_TOKENS + 2)
    rig.run()
    generated = rig.outputs[second.request_id][:BLOCK_TOKENS]
    table = rig.device.tables[second.request_id][0]
    third = rig.add([*whole, *generated, *prompt(19 * BLOCK_TOKENS - 2, seed=3)], n=1)
    rig.run()
    hit = rig.device.tables[third.request_id][0][:5]
    assert hit[4] == table[4] and hit[3] != table[3], "control: of two copies"
    assert table[3] in rig.device.tables[third.request_id][0][5:], "control: the other copy has made room"
    rig.verify()
    assert rig.ask([*whole, *generated, 7], n=1) == 5 * BLOCK_TOKENS, "and is found afterwards"
