"""Sessions of people: the cookie, its end, and acts that come from elsewhere (CSRF)."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import select

from kvcustody.audit.store.schema.service import service_sessions
from kvcustody.governance.service.service import Service

ROOT = Path(__file__).resolve().parents[3]


def test_a_session_is_its_principal_and_ends(service: Service, client, people) -> None:
    begun = client("POST", "/v1/session", people["tenant-viewer@acme"])
    cookie = begun.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and "Path=/" in cookie
    session = {"Cookie": cookie.split(";")[0]}
    who = client("GET", "/v1/whoami", headers=session).json()
    assert (who["name"], who["by"], who["tenant"]) == ("tenant-viewer@acme", "session", "acme")
    with service.reading() as connection:
        kept = connection.execute(select(service_sessions.c.digest)).scalars().all()
    assert session["Cookie"].split("=")[1] not in kept
    csrf = begun.json()["csrf"]
    assert client("DELETE", "/v1/session", headers={**session, "X-CSRF-Token": csrf}).status_code == 204
    assert client("GET", "/v1/whoami", headers=session).status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"X-CSRF-Token": "0" * 64},
        {"X-CSRF-Token": "right", "Origin": "http://evil.example"},
        {"X-CSRF-Token": "right", "Origin": "null"},
        {"X-CSRF-Token": "right", "Sec-Fetch-Site": "cross-site"},
        {"X-CSRF-Token": "right", "Sec-Fetch-Site": "same-site"},
    ],
)
def test_an_act_from_another_page_is_refused(client, people, headers: dict[str, str]) -> None:
    """CSRF: none of these rotates a key; the control is the same act from our own page."""
    begun = client("POST", "/v1/session", people["auditor"])
    session, csrf = {"Cookie": begun.headers["set-cookie"].split(";")[0]}, begun.json()["csrf"]
    sent = {name: csrf if value == "right" else value for name, value in headers.items()}
    refused = client("POST", "/v1/keys:rotate", json={}, headers={**session, **sent})
    assert refused.status_code == 403 and refused.json()["type"].endswith(":csrf")
    ours = {"X-CSRF-Token": csrf, "Origin": "http://testserver", "Sec-Fetch-Site": "same-origin"}
    assert client("POST", "/v1/keys:rotate", json={"overlap_days": 1}, headers={**session, **ours}).status_code == 201
