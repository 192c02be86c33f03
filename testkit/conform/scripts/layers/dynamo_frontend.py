"""Who decides in which tenant's namespace Dynamo's frontend looks up a request?

    python dynamo_frontend.py tenant-by-own-word        # needs: ai-dynamo-runtime

Dynamo's HTTP service on loopback, with an engine behind it that keeps what it is asked.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import urllib.request
from typing import Any

os.environ |= {"DYN_LOG": "error", "DYN_TCP_RPC_HOST": "127.0.0.1"}


def _ask(port: int, headers: dict[str, str]) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}
    body["nvext"] = {"cache_salt": "acme"}  # as a gateway in front of it would have put
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=20) as answer:  # noqa: S310
        answer.read()


async def _namespaces(*asked: dict[str, str]) -> list[str]:
    """Return the namespace that the engine receives for each set of headers."""
    from dynamo.llm import HttpAsyncEngine, HttpService
    from dynamo.runtime import DistributedRuntime

    loop, seen = asyncio.get_running_loop(), []
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = int(found.getsockname()[1])

    async def engine(request: Any, context: Any = None) -> Any:
        seen.append(str((request.get("nvext") or {}).get("cache_salt")))
        delta = {"index": 0, "delta": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}
        yield {"id": "1", "choices": [delta], "created": 0, "model": "m", "object": "chat.completion.chunk"}

    service = HttpService(port)
    service.add_chat_completions_model("m", "checksum", HttpAsyncEngine(engine, loop))
    service.enable_endpoint("chat", True)
    running = asyncio.ensure_future(service.run(DistributedRuntime(loop, "mem", "tcp")))
    for _ in range(100):
        await asyncio.sleep(0.1)
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) == 0:
                break
    for headers in asked:
        await asyncio.to_thread(_ask, port, headers)
    running.cancel()
    return seen


def main(case: str) -> dict[str, Any]:
    """Return what was seen."""
    assert case == "tenant-by-own-word"
    own, claimed = asyncio.run(_namespaces({}, {"x-tenant-id": "beta"}))
    assert own == "acme", "without a header it is the body's"
    return {
        "found": claimed == "beta",
        "evidence": "with `x-tenant-id: beta`, and no credential, a request of `acme` looks in the namespace of "
        f"`{claimed}`",
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])), flush=True)
    os._exit(0)
