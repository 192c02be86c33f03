"""Receivers of leaves that fail as a test asks."""

from __future__ import annotations


class Flaky:
    """A sink that fails as it is told, and remembers what it took."""

    name = "flaky"
    content_type = "application/json"

    def __init__(self, *outcomes: Exception | None) -> None:
        self.outcomes = list(outcomes)
        self.taken: list[tuple[str, bytes]] = []
        self.tried: list[str] = []

    def deliver(self, identity: str, body: bytes, content_type: str = "") -> None:
        self.tried.append(identity)
        problem = self.outcomes.pop(0) if self.outcomes else None
        if problem is not None:
            raise problem
        self.taken.append((identity, body))
