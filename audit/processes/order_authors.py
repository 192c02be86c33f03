"""What is said of orders whose author nobody checks."""

from __future__ import annotations

NOT_AUTHENTICATED = (
    "Orders are not authenticated: no leaf carries the signature of who asked for an erasure, a restriction, later "
    "keys or monitoring. Workers behind a control plane write no orders. A worker with a ledger of its own follows "
    "every order that was written there."
)
