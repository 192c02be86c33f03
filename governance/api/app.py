"""The ASGI application: every operation behind the gate, and a mount for a console's pages.

1. `create_app(service)` is all that a server needs; `pages` are what a console adds, and `workers_only` cuts it down
   to what workers may ask.
"""

from __future__ import annotations

from kvcustody.governance.api.declarations import every_operation
from kvcustody.governance.api.http.console_mount import Pages
from kvcustody.governance.api.http.gate import Gate
from kvcustody.governance.service.service import Service


def create_app(service: Service, *, workers_only: bool = False, pages: Pages | None = None) -> Gate:
    """The ASGI application of a service."""
    return Gate(every_operation(), service, workers_only=workers_only, pages=pages)
