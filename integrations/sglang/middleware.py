"""The HTTP door: SGLang's server behind the identity module, with the paths that SGLang has.

1. What is not listed here, in the identity document, or open, is refused to tenants: administration, sessions, weights,
   profiling, and whatever a later version adds.
2. A token travels whole in `cache_salt`. A client's own `cache_salt` and `extra_key` can only narrow.
3. What a client says of its content, what roles say of it, and the request's trace travel in `custom_params`.
"""

from __future__ import annotations

import atexit
from types import ModuleType
from typing import Final

from kvcustody.clock import SystemClock
from kvcustody.governance.observability.logs import configure
from kvcustody.governance.settings import load_settings
from kvcustody.integrations.identity.from_settings import open_attempts, open_identity, open_request_gate
from kvcustody.integrations.identity.middleware import IdentityMiddleware
from kvcustody.integrations.identity.refusal import Application
from kvcustody.integrations.identity.routes import Body, EngineServer, Room, Scoped
from kvcustody.integrations.sglang.message_kinds import mark_messages

SERVER: Final = EngineServer(
    scoped={
        "/generate": Scoped(Body.SGLANG_GENERATE, Room.SAMPLING),
        "/v1/completions": Scoped(Body.COMPLETION, Room.CUSTOM),
        "/v1/chat/completions": Scoped(Body.CHAT, Room.CUSTOM),
    },
    whole_tokens=True,
    refused_fields=(
        *("session_params", "session_id", "lora_path", "input_embeds", "token_indices_to_pool"),
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank"),
        *("routed_dp_rank", "data_parallel_rank", "custom_logit_processor", "return_hidden_states"),
    ),
    id_fields=("rid",),
    prefix_requests=True,
)


class SglangScopeMiddleware(IdentityMiddleware):
    """The identity middleware with this process's settings. A wrong setting fails here, and nothing is served."""

    def __init__(self, app: Application) -> None:
        settings = load_settings()
        configure(settings.log_level, settings.log_format)
        attempts = open_attempts(settings, SystemClock())
        atexit.register(attempts.close)
        gate = open_request_gate(settings, server=SERVER)
        if gate.message_kinds:
            mark_messages(gate.message_kinds)
        super().__init__(app, gate, body_bytes_max=int(settings.request_bytes_max), refused=attempts.note)


def check_identity() -> None:
    """Raises `ConfigError` where the door could not open: SGLang would serve errors for ever."""
    open_identity(load_settings())


def guard(server: ModuleType) -> None:
    """Put the door before SGLang's application."""
    server.app.add_middleware(SglangScopeMiddleware)
