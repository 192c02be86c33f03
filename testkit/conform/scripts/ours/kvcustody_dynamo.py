"""The questions about Dynamo's index, put to it behind our publisher and our relay.

python -m kvcustody.testkit.conform.scripts.ours.kvcustody_dynamo CASE   # needs: ai-dynamo-runtime, kvcustody
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
import time
from typing import Any

from kvcustody.clock import SystemClock
from kvcustody.governance.edge.current_namespaces import CurrentNamespaces
from kvcustody.governance.edge.named_requester import NamedRequester
from kvcustody.governance.edge.router_namespace import RouterNamespaces
from kvcustody.governance.keys.locked_buffer import KeyBuffer
from kvcustody.integrations.dynamo.relay import ScopedRelay
from kvcustody.integrations.events.block_event import EventScope, stored
from kvcustody.integrations.events.publisher import EventPublisher
from kvcustody.testkit.conform.scripts.layers import dynamo_indexer as asked

LOCAL = "tcp://127.0.0.1:0"
ISSUER = "api-keys"
SCOPE = EventScope("acme", "tenant", "internal", 3, 5, NamedRequester(ISSUER, "acme"))


def namespaces() -> CurrentNamespaces:
    """Return namespaces of a secret that only this deployment has."""
    with KeyBuffer() as secret:
        secret.writable()[:] = os.urandom(32)
        return CurrentNamespaces(RouterNamespaces(secret), SystemClock(), days=0)


def _published(case: str) -> dict[str, Any]:
    """Publish acme's blocks; return to whom the index reveals them, or what its dump contains."""
    names = namespaces()
    own, beta = [names.of(ISSUER, tenant) for tenant in ("acme", "beta")]
    keys = b"".join(hashlib.sha256(bytes([at])).digest() for at in range(asked.BLOCKS))
    event = stored(SCOPE, keys, residency=7, block_tokens=asked.BLOCK, tokens=asked.TOKENS)
    with (
        EventPublisher(LOCAL, form="dynamo", namespaces=names, tokens_published=True) as publisher,
        asked.indexer(publisher.endpoint) as index,
    ):

        def is_told() -> bool:
            publisher.publish([event])
            return index.blocks(own) == asked.BLOCKS

        asked.wait(is_told, "the owner is told of nothing")
        if case == "salt-dropped":
            foreign = sum(index.blocks(whose) for whose in (beta, "acme", None))
            evidence = f"{foreign} of {asked.BLOCKS} blocks of `acme` are told to another tenant or to nobody"
            return {"found": foreign > 0, "evidence": evidence}
        dump = json.dumps(index.call("/dump"))
    guesses = (None, "acme", f"{ISSUER}/acme", beta)
    told = max(sum(str(hash_) in dump for hash_ in asked.guessed(asked.TOKENS, salt)) for salt in guesses)
    assert all(str(hash_) in dump for hash_ in asked.guessed(asked.TOKENS, own)), "they are in it, by their own name"
    found = told > 0 or "acme" in dump
    return {
        "found": found,
        "evidence": f"of a guessed prompt and tenant the dump tells {told} of {asked.BLOCKS} blocks",
    }


def _relayed() -> dict[str, Any]:
    """Relay an engine's positional event and then one that names its salt."""
    import msgspec
    import zmq

    with zmq.Context() as context, context.socket(zmq.PUB) as engine:
        engine.setsockopt(zmq.LINGER, 0)
        engine.bind(LOCAL)
        numbers = itertools.count()
        relay = ScopedRelay(engine.getsockopt_string(zmq.LAST_ENDPOINT), LOCAL)
        mark = {
            **asked.named("acme"),
            "token_ids": asked.TOKENS[::-1],
            "block_hashes": [7, *asked.HASHES[1:]],
        }
        with relay, asked.indexer(relay.endpoint) as index:

            def is_told() -> bool:
                for event in (asked.positional("acme"), mark):
                    payload = msgspec.msgpack.encode([time.time(), [event], 0])
                    engine.send_multipart([b"", next(numbers).to_bytes(8, "big"), payload])
                    relay.step(50)
                return index.blocks("acme", asked.TOKENS[::-1]) == asked.BLOCKS

            asked.wait(is_told, "what is scoped does not pass")
            foreign = index.blocks(None)
        refused = relay.stats().refused
    assert refused > 0, "the event arrived"
    evidence = f"{foreign} of {asked.BLOCKS} blocks of a salted prompt are told to whoever names no salt"
    return {"found": foreign > 0, "evidence": evidence}


def main(case: str) -> dict[str, Any]:
    """Return what was seen."""
    return _relayed() if case == "unscoped-events" else _published(case)


CASES = ("salt-dropped", "unscoped-events", "index-dump")

if __name__ == "__main__":
    print(json.dumps(main(CASES[CASES.index(sys.argv[1])])))
