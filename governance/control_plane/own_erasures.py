"""Erasures that a worker's own engine began, kept until the control plane has them on record.

1. A request is kept in a file before a leaf about it is spilled, and handed in before a leaf about it is.
2. The control plane writes the leaf, and names this worker as its actor. A request that it refuses is dropped and
   logged: the erasure has taken effect here, and nobody else carries it out.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import NamedTuple

import orjson

from kvcustody.audit.kinds import ErasureRequested
from kvcustody.errors import ConfigError, ServiceError
from kvcustody.files import write_file
from kvcustody.governance.control_plane.connection import ControlPlaneConnection
from kvcustody.governance.erasure.selector import selector_of
from kvcustody.logger import get_logger

_log = get_logger(__name__)
_FINAL = frozenset({"conflict", "invalid", "malformed", "forbidden"})  # problems that no repetition changes


class OwnErasure(NamedTuple):
    """One request; `deadline_us` is UTC."""

    erasure: str
    selector: str
    deadline_us: int


class OwnErasures:
    """The requests that are not yet on record; thread-safe."""

    def __init__(self, path: Path) -> None:
        """Those in the file are taken up again; raises `ConfigError` where it cannot be read."""
        self._path = path
        self._lock = threading.Lock()
        self._handing_in = threading.Lock()
        self._waiting: dict[str, OwnErasure] = {}
        try:
            rows = orjson.loads(path.read_bytes())
            self._waiting = {row[0]: OwnErasure(*row) for row in rows}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, LookupError) as problem:
            raise ConfigError(
                f"erasures of this worker `{path}`: {type(problem).__name__}; move the file away to start without them",
                path=path,
            ) from None
        self._kept = frozenset(self._waiting)

    def add(self, requested: ErasureRequested, offset_us: int) -> None:
        """Queue a request. Runs on the engine's owning thread, so it writes no file."""
        selector = selector_of(requested.tenant, requested.subject, requested.session, requested.detail)
        made = OwnErasure(requested.erasure, selector.text(), requested.deadline_us + offset_us)
        with self._lock:
            self._waiting[made.erasure] = made

    def keep(self) -> None:
        """Write the queued requests to the file (rule 1)."""
        with self._lock:
            waiting = list(self._waiting.values())
            if frozenset(self._waiting) == self._kept:
                return
            write_file(self._path, orjson.dumps([list(one) for one in waiting]))
            self._kept = frozenset(self._waiting)

    def hand_in(self, connection: ControlPlaneConnection) -> None:
        """Ask the control plane to record the queued requests; raises `ServiceError` where it cannot now."""
        if not self._waiting:
            return
        with self._handing_in:
            for one in list(self._waiting.values()):
                body = {"selector": one.selector, "deadline_us": one.deadline_us}
                try:
                    connection.put(f"/v1/worker/erasures/{one.erasure}", body)
                except ServiceError as error:
                    if error.operands.get("problem") not in _FINAL:
                        raise
                    _log.error("an erasure is not requested", erasure=one.erasure, reason=error.message)
                with self._lock:
                    del self._waiting[one.erasure]
            self.keep()
