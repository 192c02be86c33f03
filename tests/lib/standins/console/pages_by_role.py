"""The pages of the console, by who sees most of each."""

from __future__ import annotations

PAGES = {
    "auditor": {
        "overview": "/",
        "policy": "/policy",
        "policy-revision": "/policy/1",
        "grants": "/grants",
        "rule": "/decisions/rule?id=no-restricted&revision=1",
        "custody": "/custody",
        "reuse": "/reuse?since=2020-01-01T00:00",
        "audit-wrong": "/audit?kind=reciept",
        "tiers": "/tiers?period=30d",
        "deletion": "/deletion?period=7d",
        "audit": "/audit?tenant=acme",
        "audit-empty": "/audit?tenant=acme&actor=nobody",
        "reports": "/reports",
        "problem": "/nothing",
    },
    "approver": {
        "draft": "/policy/draft",
        "decisions": "/decisions?reader=labs&owner=acme&classification=confidential&via=grant",
    },
    "operator": {"health": "/health", "fleet": "/fleet", "routes": "/routes?period=7d"},
    "key-custodian": {"access": "/principals", "access-one": "/principals?name=auditor"},
    "tenant-admin@acme": {
        "subject": "/custody/subject?subject=user-1",
        "consents": "/policy/consents",
        "own-grants": "/grants",
        "erasures": "/erasures",
        "cases": "/cases",
        "tenant-decisions": "/decisions",
    },
}
