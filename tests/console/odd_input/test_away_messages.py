"""A control plane that is not there, or speaks no TLS: what is wrong and what to do, in our words."""

from __future__ import annotations

import http.server
import socket
import threading

import pytest

from kvcustody.errors import ServiceError
from kvcustody.governance.control_plane.connection import ControlPlaneConnection


def said(server: str) -> str:
    with ControlPlaneConnection(server, "a-key-of-nobody") as connection, pytest.raises(ServiceError) as caught:
        connection.get("/v1/whoami")
    return caught.value.message


def test_a_server_without_tls_and_an_empty_port_are_told_apart() -> None:
    """The control for both is the other."""
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        message = said(f"https://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()
    assert "speaks no TLS; name it with http://" in message and "wrong version" not in message
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    assert "connection refused; check the address, and that it is running" in said(f"http://127.0.0.1:{port}")
