"""A release of policies behind the control plane, as the store that desks and workers read.

S1 What is read is verified by its reader: the control plane could withhold steps, never invent or reorder one.
S2 Steps are asked for from the last one known on. Where the control plane has fewer, all are read anew, so that the
   reader's own mark notices that steps are gone.
"""

from __future__ import annotations

from typing import Any

from kvcustody.errors import ServiceError
from kvcustody.governance.control_plane.connection import Connection
from kvcustody.governance.release.record import ReleaseError, Step, read_record

_OPERATIONS = {
    Step.PROPOSED: "propose",
    Step.APPROVED: "approve",
    Step.CONSENTED: "consent",
    Step.ACTIVATED: "activate",
    Step.REVOKED: "revoke",
    Step.BROKE_GLASS: "break-glass",
}


class WorkerReleaseStore:
    """The release as a worker reads it; it takes no step."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._records: list[bytes] = []

    def read(self) -> list[bytes]:
        """Every record; raises `ReleaseError` where the control plane cannot be asked."""
        while True:
            found = self._ask(len(self._records))
            if found["total"] < len(self._records):
                self._records.clear()
                continue
            self._records += [item.encode() for item in found["items"]]
            if len(self._records) == found["total"]:
                return list(self._records)
            if not found["items"]:
                raise ReleaseError("the control plane withholds steps of the release")

    def append(self, number: int, data: bytes) -> None:
        """A worker takes no step of a release."""
        raise ReleaseError("a worker takes no step of a release")

    def _ask(self, after: int) -> Any:
        try:
            return self._connection.get("/v1/worker/policy/records", after=after)
        except ServiceError as error:
            raise ReleaseError(error.message) from None


class DeskReleaseStore:
    """The release as a person's desk reads it and adds to it, over the API; signing stays with the desk."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._seen = ""

    def read(self) -> list[bytes]:
        """Every record, and the release's `ETag` for the step that builds on them."""
        try:
            self._seen = self._connection.request("GET", "/v1/policies/release").headers["etag"]
            found: list[bytes] = []
            cursor = None
            while True:
                page = self._connection.get("/v1/policies/records", cursor=cursor, limit=1000)
                found += [item.encode() for item in page["items"]]
                cursor = page["next"]
                if cursor is None:
                    return found
        except ServiceError as error:
            raise ReleaseError(error.message) from None

    def append(self, number: int, data: bytes) -> None:
        """Send a signed step to the operation that it belongs to; the service checks it again."""
        record = read_record(data)
        verb = _OPERATIONS[record.action]
        headers: dict[str, str] = {}
        if record.action is Step.ACTIVATED:
            verb = "activate" if record.body.get("stage") is None else "stage"
            headers["If-Match"] = self._seen
        try:
            self._connection.post(f"/v1/policies:{verb}", {"record": data.decode()}, headers=headers)
        except ServiceError as error:
            raise ReleaseError(error.message) from None
