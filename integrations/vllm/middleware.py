"""The class to name on vLLM's command line: `--middleware kvcustody.integrations.vllm.middleware.ScopeMiddleware`."""

from __future__ import annotations

import atexit

from kvcustody.clock import SystemClock
from kvcustody.governance.observability.logs import configure
from kvcustody.governance.settings import load_settings
from kvcustody.integrations.identity.from_settings import open_attempts, open_request_gate
from kvcustody.integrations.identity.middleware import IdentityMiddleware
from kvcustody.integrations.identity.refusal import Application
from kvcustody.integrations.vllm.message_kinds import mark_messages
from kvcustody.integrations.vllm.refused_metric import counted


class ScopeMiddleware(IdentityMiddleware):
    """The identity middleware with this process's settings. A wrong setting fails here, and nothing is served."""

    def __init__(self, app: Application) -> None:
        settings = load_settings()
        configure(settings.log_level, settings.log_format)
        attempts = open_attempts(settings, SystemClock())
        atexit.register(attempts.close)
        gate = open_request_gate(settings)
        if gate.message_kinds:
            mark_messages(gate.message_kinds)
        super().__init__(app, gate, body_bytes_max=int(settings.request_bytes_max), refused=counted(attempts.note))
