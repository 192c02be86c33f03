"""A policy release behind the control plane, as a store for desks and workers.

1. What is read is verified by its reader: the control plane could withhold steps, never invent or reorder one.
2. Steps are asked for from the last one known on. Where the control plane has fewer, all are read anew, so that the
   reader's own mark notices that steps are gone.
3. A worker keeps the records it has read. Where the control plane is away at its start, it reads those: verified
   anew, never behind its mark, and counted as no word from the control plane. What refuses it is never taken for
   absence.
"""

from __future__ import annotations

from pathlib import Path

from kvcustody.errors import ServiceError
from kvcustody.files import write_file
from kvcustody.governance.control_plane.connection import ControlPlaneConnection, is_away
from kvcustody.governance.release.record import ReleaseAction, ReleaseError, read_record

_OPERATIONS = {
    ReleaseAction.PROPOSED: "propose",
    ReleaseAction.APPROVED: "approve",
    ReleaseAction.CONSENTED: "consent",
    ReleaseAction.ACTIVATED: "activate",
    ReleaseAction.REVOKED: "revoke",
    ReleaseAction.BROKE_GLASS: "break-glass",
}


class WorkerReleaseStore:
    """The release as a worker reads it, without taking steps."""

    def __init__(
        self, connection: ControlPlaneConnection, *, kept_path: Path | None = None, wait_seconds: int = 0
    ) -> None:
        """`kept_path`: where its records are kept for a start without the control plane (rule 3)."""
        self._connection = connection
        self._kept_path = kept_path
        self._wait_seconds = wait_seconds
        self._records: list[bytes] = []
        self._kept = 0
        self.heard = False  # the control plane has answered this process

    def read(self, after: int = 0) -> list[bytes]:
        """Return every record beyond number `after`; raises `ReleaseError` where the control plane does not answer."""
        try:
            self._take_in()
        except ServiceError as error:
            if self.heard or not is_away(error) or not self._take_kept():
                raise ReleaseError(error.message) from None
        else:
            self._keep()
        return self._records[after:]

    def append(self, number: int, data: bytes) -> None:
        """Refuse: a worker cannot take a step of a release."""
        raise ReleaseError("a worker cannot take a step of a release")

    def _take_in(self) -> None:
        while True:
            wait = self._wait_seconds if self.heard else 0
            page = self._connection.get("/v1/worker/policy/records", after=len(self._records), wait=wait or None)
            self.heard = True
            if page["total"] < len(self._records):
                self._records.clear()
                continue
            self._records += [item.encode() for item in page["items"]]
            if len(self._records) == page["total"]:
                return
            if not page["items"]:
                raise ReleaseError("the control plane withholds steps of the release")

    def _take_kept(self) -> bool:
        """Read what was kept; False where that is nothing."""
        if not self._records and self._kept_path is not None and self._kept_path.exists():
            try:
                self._records = self._kept_path.read_bytes().splitlines()
            except OSError as error:
                raise ReleaseError(f"kept release `{self._kept_path}`: {error.strerror}") from None
            self._kept = len(self._records)
        return bool(self._records)

    def _keep(self) -> None:
        """Keep the records durably; fewer than before never replace more."""
        path = self._kept_path
        if path is None or len(self._records) <= self._kept:
            return
        try:
            write_file(path, b"\n".join(self._records) + b"\n")
        except OSError as error:
            raise ReleaseError(f"kept release `{path}`: {error.strerror}") from None
        self._kept = len(self._records)


class WorkflowReleaseStore:
    """The release as a person's desk reads and extends it over the API; the desk signs."""

    def __init__(self, connection: ControlPlaneConnection) -> None:
        self._connection = connection
        self._seen = ""

    def read(self, after: int = 0) -> list[bytes]:
        """Return every record beyond number `after`; keeps the release's `ETag` for the step that builds on them."""
        try:
            self._seen = self._connection.request("GET", "/v1/policies/release").headers["etag"]
            records: list[bytes] = []
            cursor = None
            while True:
                page = self._connection.get("/v1/policies/records", cursor=cursor, limit=1000)
                records += [item.encode() for item in page["items"]]
                cursor = page["next"]
                if cursor is None:
                    return records[after:]
        except ServiceError as error:
            raise ReleaseError(error.message) from None

    def append(self, number: int, data: bytes) -> None:
        """Send a signed step to its operation; the service checks it again."""
        record = read_record(data)
        verb = _OPERATIONS[record.action]
        headers: dict[str, str] = {}
        if record.action is ReleaseAction.ACTIVATED:
            verb = "activate" if record.body.get("stage") is None else "stage"
            headers["If-Match"] = self._seen
        try:
            self._connection.post(f"/v1/policies:{verb}", {"record": data.decode()}, headers=headers)
        except ServiceError as error:
            raise ReleaseError(error.message) from None
