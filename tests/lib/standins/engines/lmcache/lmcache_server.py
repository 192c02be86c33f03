"""LMCache's own server on loopback, with an adapter for its second tier, or without: the kit's, by its own clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvcustody.testkit.lmcache import server
from kvcustody.testkit.lmcache.server import GOVERNED, READ_SECONDS, our_adapter

__all__ = ["CHUNK_TOKENS", "GOVERNED", "OURS", "READ_SECONDS", "LMCacheServer"]
CHUNK_TOKENS = 64
OURS = our_adapter(CHUNK_TOKENS)


class LMCacheServer(server.LMCacheServer):
    """A process; `kill` or `close` it."""

    def __init__(
        self,
        folder: Path,
        environment: dict[str, str],
        adapter: dict[str, Any] | None = OURS,
        *more: str,
        **named: Any,
    ) -> None:
        """Governed, where it is our adapter and nothing else is said."""
        if adapter is OURS and not more:
            more = GOVERNED
        super().__init__(folder, environment, adapter, *more, chunk_tokens=CHUNK_TOKENS, **named)
