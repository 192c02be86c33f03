"""The parts of a request that an operation reads, without a connection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class OperationRequest(NamedTuple):
    """One request; its path is decoded, as a server hands it on."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
