"""What the kit found in the port, at the port itself: handles of an earlier life, and fences of a part of a run."""

import numpy as np

from kvcustody.testkit.conformance.case import Bench, person
from kvcustody.testkit.conformance.engines.reference_engine import ReferenceEngine
from kvcustody.testkit.conformance.policy import ONCE


def test_releasing_a_preempted_residency_again_leaves_its_successor_alone():
    bench = Bench(ReferenceEngine, 1)
    rig = bench.open()
    request = rig.submit(person("alpha"), rig.prompt(4), 8)
    rig.until_output(request, 2)
    engine = rig.engine
    old = engine.admitted[engine.requests[request]].residency
    engine.preempt(request)
    rig.steps(2)
    assert engine.port.release(old, "again") is False
    rig.healthy()
    rig.finish(request)
    bench.close()


def test_a_block_that_is_handed_out_early_leaves_the_rest_of_its_run_behind_the_fence():
    bench = Bench(ReferenceEngine, 1)
    rig = bench.open(blocks=8)
    request = rig.submit(person("alpha"), rig.prompt(4), 2, route=ONCE)  # never cached: all of it ends
    table = list(rig.until_running(request).blocks)
    rig.steps(1)
    port, pool = rig.engine.port, rig.engine.pool
    fence = port.fence()  # a transfer into all but one of its blocks
    rig.engine.blocks.pin(table[:-1])
    rig.engine.abort(request)
    pool.queue.release_fence(np.array(table[-1:]), rig.clock.now_us())
    order = port.step()
    assert order is not None
    assert np.concatenate([blocks for _, blocks in order.batches]).tolist() == table[-1:]
    assert pool.queue.fenced_blocks() == len(table) - 1
    rig.engine.device.submit(rig.engine.first(order))
    rig.engine.end_transfer(table[:-1], fence)
    rig.settle()
    rig.idle(1_000_000)
    bench.close()
