"""The questions about Dynamo's frontend and vLLM's transfer parameters, put to the door in front of an engine.

python -m kvcustody.testkit.conform.scripts.ours.kvcustody_door CASE        # needs: kvcustody
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from kvcustody.clock import SystemClock
from kvcustody.files import write_file
from kvcustody.governance.credentials.api_key_file import ISSUER, add_key
from kvcustody.governance.edge.current_namespaces import CurrentNamespaces
from kvcustody.governance.edge.router_namespace import RouterNamespaces
from kvcustody.governance.keys.locked_buffer import KeyBuffer
from kvcustody.integrations.identity.identity_document import load_identity
from kvcustody.integrations.identity.middleware import IdentityMiddleware
from kvcustody.integrations.identity.request_gate import RequestGate

DOCUMENT = b"schema: kvcustody/identity@1\napi_keys: {path: keys.yaml}\n"
COMPLETE = {
    "do_remote_prefill": True,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "engine",
    "remote_request_id": "request",
    "remote_host": "127.0.0.1",
    "remote_port": 1,
}


class Door:
    """A door with a key for one tenant, and an engine behind it that records requests."""

    def __init__(self, folder: Path) -> None:
        self.key = add_key(folder / "keys.yaml", {"name": "acme", "tenant": "acme"})
        write_file(folder / "identity.yaml", DOCUMENT)
        secret = KeyBuffer()
        secret.writable()[:] = bytes(range(32))
        self.beta = CurrentNamespaces(RouterNamespaces(secret), SystemClock()).of(ISSUER, "beta")
        self._gate = RequestGate(load_identity(folder / "identity.yaml"), folder, secret, SystemClock())
        self.reached: list[dict[str, str]] = []

    async def _engine(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached.append({name.decode(): value.decode() for name, value in scope["headers"]})
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    def ask(self, headers: dict[str, str], **body: Any) -> int:
        """Return the status of the answer to the tenant's request."""
        data, sent = json.dumps({"prompt": "p", **body}).encode(), []
        given = {"authorization": f"Bearer {self.key}", "content-type": "application/json", **headers}
        raw = [(name.encode(), value.encode()) for name, value in given.items()]
        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "root_path": "",
            "headers": raw,
        }
        scope["client"] = ("127.0.0.1", 1)

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": data, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        asyncio.run(IdentityMiddleware(self._engine, self._gate)(scope, receive, send))
        return int(sent[0]["status"])


def main(case: str) -> dict[str, Any]:
    """Return what was seen."""
    with tempfile.TemporaryDirectory() as folder:
        door = Door(Path(folder))
        assert door.ask({}) == 200 and len(door.reached) == 1, "an ordinary request passes"
        if case == "tenant-by-own-word":
            spelt = [{name: value} for name in ("x-tenant-id", "X_Tenant-Id") for value in ("beta", door.beta)]
            answers = [door.ask(headers) for headers in spelt]
            assert set(answers) == {200}
            [own, *claimed] = [headers.get("x-tenant-id") for headers in door.reached]
            wrong = sum(name != own for name in claimed)
            evidence = f"{wrong} of {len(claimed)} requests that named another tenant were passed on as another's"
            return {"found": wrong > 0, "evidence": evidence}
        assert case == "params-end-engine"
        names = [name for name in COMPLETE if name != "do_remote_prefill"]
        partial = [{given: value for given, value in COMPLETE.items() if given != name} for name in names]
        refused = [door.ask({}, kv_transfer_params=params) for params in (COMPLETE, *partial)]
        passed = len(door.reached) - 1
        evidence = f"{passed} of {len(refused)} requests with transfer parameters reached the engine"
        return {"found": passed > 0, "evidence": evidence}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
