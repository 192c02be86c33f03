"""The question about vLLM's events, put to our publisher in vLLM's format.

python -m kvcustody.testkit.conform.scripts.ours.kvcustody_events CASE        # needs: kvcustody[events]
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

from kvcustody.governance.edge.named_requester import NamedRequester
from kvcustody.integrations.events.block_event import EventScope, stored
from kvcustody.integrations.events.publisher import EventPublisher

BLOCK_TOKENS, BLOCKS, SALT = 32, 4, "a-salt-of-acme"
PROMPT = [3 + number * 7 % 1000 for number in range(BLOCK_TOKENS * BLOCKS)]
SCOPE = EventScope("acme", "tenant", "internal", 3, 5, NamedRequester("api-keys", "acme"))


def heard(**terms: Any) -> list[Any]:
    """Return what a listener receives about one prompt's blocks from a publisher with these settings."""
    import msgspec
    import zmq

    keys = b"".join(hashlib.sha256(bytes([at])).digest() for at in range(BLOCKS))
    with EventPublisher("tcp://127.0.0.1:0", **terms) as publisher, zmq.Context() as context:
        listener = context.socket(zmq.SUB)
        listener.connect(publisher.endpoint)
        listener.subscribe(b"")
        listener.setsockopt(zmq.RCVTIMEO, 200)
        try:
            for _ in range(50):  # the first may pass before the listener has joined
                publisher.publish(
                    [stored(SCOPE, keys, residency=7, block_tokens=BLOCK_TOKENS, tokens=PROMPT, salt=SALT)]
                )
                try:
                    return list(msgspec.msgpack.decode(listener.recv_multipart()[-1])[1])
                except zmq.Again:
                    continue
        finally:
            listener.close(linger=0)
    raise RuntimeError("no event arrived")


def main(case: str) -> dict[str, Any]:
    """Return what was seen."""
    assert case == "events-tell-prompts"
    text = json.dumps(heard(), default=str)
    tokens, salt = json.dumps(PROMPT[:BLOCK_TOKENS])[1:-1] in text, SALT in text
    told = len(PROMPT) if tokens else 0
    evidence = f"{told} of {len(PROMPT)} tokens of the prompt, and the salt {'too' if salt else 'not'}"
    return {"found": tokens or salt, "evidence": evidence}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
