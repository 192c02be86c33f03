"""Every block is zero before its next write, read back from the worker's tensors; beside it, what plain vLLM had."""

from __future__ import annotations

import time

import pytest

from standins.engines.vllm.engine_probe import SOILED
from standins.engines.vllm.local_engine import LocalEngine, environment
from standins.engines.vllm.workload import churn, outgrow


def settled(engine: LocalEngine, seconds: float = 5.0) -> int:
    """What free blocks hold once the scrub deadline has passed."""
    until = time.monotonic() + seconds
    while engine.free_residue() and time.monotonic() < until:
        time.sleep(0.2)
    return engine.free_residue()


def test_no_block_is_written_before_it_is_zero(governed: LocalEngine, plain: LocalEngine):
    figures = {}
    for name, engine in (("plain", plain), ("governed", governed)):
        engine.write_report()
        done = churn(engine, seed=11)
        figures[name] = engine.write_report() | {"left": settled(engine, 5 * (name == "governed"))}
        print(name, done, figures[name])
        assert done["finished"] > 20
        assert done["aborted"] > 3
        assert done["chunked"] > 3
    control, found = figures["plain"], figures["governed"]
    assert control["dirty_blocks"] > 50
    assert control["nonzero_bytes"] > 100_000
    assert control["left"] > 10_000
    assert found["blocks"] > 100
    assert (found["dirty_blocks"], found["nonzero_bytes"], found["left"]) == (0, 0, 0)
    assert governed.governance("check") == []


def test_preempted_requests_lose_their_blocks_and_come_back(governed: LocalEngine, plain: LocalEngine):
    plain.write_report()
    assert outgrow(plain) > 0
    assert plain.write_report()["dirty_blocks"] > 0
    governed.write_report()
    preempted = outgrow(governed)
    report = governed.write_report()
    print("governed:", preempted, "preemptions", report)
    assert preempted > 0
    assert report["blocks"] > 60
    assert report["nonzero_bytes"] == 0
    assert governed.governance("check") == []
    assert governed.governance("scan") == []


@pytest.mark.parametrize("order", ["start to end", "aborted"])
def test_a_restricted_request_is_wiped_when_it_ends(governed: LocalEngine, order: str):
    request_id = governed.submit(list(range(30, 160)), tenant="secret", max_tokens=20)
    if order == "aborted":
        for _ in range(4):
            governed.step()
        governed.abort(request_id)
    governed.finish()
    assert settled(governed) == 0
    indexed = governed.probe("pool")["indexed"]
    held = sum(count for block, count in enumerate(governed.residue()) if count and not indexed[block] and block)
    assert held == 0


@pytest.mark.soak  # test_death starts an engine over soiled memory as well
def test_what_was_in_the_memory_before_is_gone_before_the_first_request(start, new_deployment):
    with environment({SOILED: "1"}):
        engine = start(deployment=new_deployment())
    assert engine.rpc("soiled_bytes")[0] > 100_000, "positive control"
    assert sum(engine.residue()) == 0


OFF = {"enable_prefix_caching": False}
SMALL = {"max_num_batched_tokens": 64, "max_num_seqs": 4}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(OFF | SMALL, id="prefix caching off, small chunks"),
        pytest.param(OFF, id="prefix caching off", marks=pytest.mark.soak),
        pytest.param(SMALL, id="small chunks", marks=pytest.mark.soak),
    ],
)
def test_other_configurations(start, new_deployment, options):
    engine = start(deployment=new_deployment(), **options)
    done = churn(engine, seed=5, requests=25)
    assert done["finished"] > 10
    if not options.get("enable_prefix_caching", True):
        assert done["cached_tokens"] == 0
    report = engine.write_report()
    assert report["blocks"] > 100
    assert report["nonzero_bytes"] == 0
    assert settled(engine) == 0
    assert engine.governance("check") == []


@pytest.mark.soak  # the control of the next test: an engine of its own takes as long as all the tests on `plain`
def test_layers_of_two_kinds_ungoverned_leave_residue(start, windowed_model):
    control = start(windowed_model)
    churn(control, seed=6, requests=25)
    assert control.write_report()["nonzero_bytes"] > 10_000


def test_layers_of_two_kinds(start, new_deployment, windowed_model):
    """Full attention and a sliding window: two groups over one pool, and blocks let go while their request runs."""
    engine = start(windowed_model, deployment=new_deployment())
    done = churn(engine, seed=6, requests=25)
    assert done["finished"] > 10
    assert done["cached_tokens"] > 0
    report = engine.write_report()
    assert report["blocks"] > 100
    assert report["nonzero_bytes"] == 0
    assert settled(engine) == 0
    assert engine.governance("check") == []
    assert engine.governance("scan") == []
