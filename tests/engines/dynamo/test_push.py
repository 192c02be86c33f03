"""Dynamo's own `KvEventPublisher` takes what we hand it. What its event plane does with it is not looked at here."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from standins import LIBRARY

PUSHES = """
import asyncio, json, os, sys
from dynamo._core import KvEventPublisher
from dynamo.runtime import DistributedRuntime
from standins.engines.dynamo.router_world import ACME, ALICE, BLOCK, namespaces, some_removed, some_stored
from kvcustody.integrations.dynamo.push_publisher import PushPublisher
from kvcustody.integrations.events.block_event import cleared


async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "mem", "tcp")
    sink = KvEventPublisher(runtime.endpoint("ns.backend.generate"), kv_block_size=BLOCK)
    pushed = PushPublisher(sink, namespaces())
    for number in range(20):
        pushed.publish([some_stored(number, ACME), some_stored(number, ALICE), some_removed(number, ACME, kept=2)])
    pushed.publish([cleared(5, "reset")])
    good = pushed.refused_batches
    class Misnamed:
        def publish_batch(self, events):
            sink.publish_batch([{**event, "tenant": "acme"} for event in events])
    control = PushPublisher(Misnamed(), namespaces())
    control.publish([some_stored(1, ACME)])
    print(json.dumps([good, control.refused_batches]), flush=True)
    os._exit(0)


asyncio.run(main())
"""


def test_it_accepts_every_batch_and_refuses_a_wrong_one() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PUSHES],
        env={**os.environ, "PYTHONPATH": str(LIBRARY)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert lines, done.stderr[-2000:]
    assert json.loads(lines[-1]) == [0, 1]
