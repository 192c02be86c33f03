"""The HTTP door: `trtllm-serve`'s application behind the identity module, in the engine's own process.

    server.app.add_middleware(TrtllmScopeMiddleware)

1. What is not listed here, in the identity document, or open, is refused to tenants: `/kv_cache_events`, which tells
   every tenant's prompts, among it.
2. The engine is given a derived salt (`derived_salt`) in `cache_salt`, in place of whatever the client sent there; the
   client's own can only narrow.
3. What a client asks to be retained, transferred, or computed with an adapter is refused here.

Never run on TensorRT-LLM itself.
"""

from __future__ import annotations

import asyncio
import atexit
from typing import Final

from kvcustody.clock import SystemClock
from kvcustody.errors import CustodyError
from kvcustody.governance.credentials.scope_token import Rejected
from kvcustody.governance.settings import load_settings
from kvcustody.integrations.identity.authenticate_request import AdmittedRequest
from kvcustody.integrations.identity.from_settings import open_attempts, open_request_gate, open_verifier
from kvcustody.integrations.identity.middleware import IdentityMiddleware
from kvcustody.integrations.identity.refusal import Application, Receive, RequestRefused
from kvcustody.integrations.identity.request_body import parse_body, write_body
from kvcustody.integrations.identity.request_headers import RequestHeaders
from kvcustody.integrations.identity.routes import Body, EngineServer, Room, Scoped
from kvcustody.integrations.tensorrt_llm.open_custody import EngineCustody, shared_custody

SERVER: Final = EngineServer(
    scoped={
        "/v1/completions": Scoped(Body.COMPLETION, Room.NONE),
        "/v1/chat/completions": Scoped(Body.CHAT, Room.NONE),
    },
    whole_tokens=True,
    refused_fields=(
        *("lora_request", "disaggregated_params", "kv_cache_retention_config", "conversation_params"),
        *("prompt_embeddings", "cache_salt_id"),
    ),
)


class TrtllmScopeMiddleware(IdentityMiddleware):
    """The identity middleware with this process's settings and custody. A wrong setting fails here."""

    def __init__(self, app: Application, custody: EngineCustody | None = None) -> None:
        settings = load_settings()
        self._custody = custody
        self._verifier = open_verifier(settings)
        attempts = open_attempts(settings, SystemClock())
        atexit.register(attempts.close)
        gate = open_request_gate(settings, server=SERVER)
        super().__init__(app, gate, body_bytes_max=int(settings.request_bytes_max), refused=attempts.note)

    async def _scoped_body(self, admitted: AdmittedRequest, headers: RequestHeaders, receive: Receive) -> bytes:
        body = parse_body(await super()._scoped_body(admitted, headers, receive))
        verified = self._verifier.verify(body.pop("cache_salt", None))
        if isinstance(verified, Rejected):
            raise RequestRefused(403, "this request is not served", reason=verified.reason)
        custody = self._custody or shared_custody()
        try:
            body["cache_salt"] = await asyncio.to_thread(custody.thread.derive, verified.principal, verified.hints)
        except CustodyError as error:
            raise RequestRefused(403, "this request is not served", reason=error.message) from None
        return write_body(body)
