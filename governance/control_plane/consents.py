"""A data owner's part in a release over the API: consents and withdrawals of grants, each a signed step.

1. What is signed is what was shown, and made of what the owner may see alone: the digest that a consent names is
   computed here, from the words of the answer.
2. A step is signed for the one deployment that the caller named, whatever the control plane says of itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvcustody.clock import Clock
from kvcustody.errors import ServiceError
from kvcustody.governance.control_plane.connection import ControlPlaneConnection
from kvcustody.governance.release import activation_gates as gates
from kvcustody.governance.release.consents import consent_body
from kvcustody.governance.release.record import ReleaseAction, ReleaseError, make_record
from kvcustody.policies.bundle.trust import Signer


class OwnerConsents:
    """A data owner's part in a release behind a control plane. `audience`: that of the trust configuration."""

    def __init__(self, connection: ControlPlaneConnection, audience: str, clock: Clock) -> None:
        self._connection = connection
        self._audience = audience
        self._clock = clock

    def waiting(self) -> list[dict[str, Any]]:
        """Return the openings that wait for the own tenant's consent; raises `ReleaseError` for an answer that
        contradicts itself.
        """
        rows: list[dict[str, Any]] = []
        cursor = None
        while True:
            page = self._get("/v1/policies/consents", cursor=cursor, limit=1000)
            rows += page["items"]
            cursor = page["next"]
            if cursor is None:
                break
        for item in rows:
            if item["opening"] != gates.opening_id(item["manifest"], item["what"]):
                raise ReleaseError(f"the control plane names another opening than it shows of `{item['what']['id']}`")
        return rows

    def consent(self, revision: int, source: str, signer: Signer) -> list[dict[str, Any]]:
        """Consent to what a revision opens through the grant or segment `source`; returns its description."""
        openings = [item for item in self.waiting() if (item["revision"], item["what"]["id"]) == (revision, source)]
        if not openings:
            raise ReleaseError(f"nothing that revision `{revision}` opens through `{source}` waits for a consent")
        for item in openings:
            body = consent_body(revision, item["manifest"], item["what"])
            self._send(ReleaseAction.CONSENTED, "consent", body, signer)
        return [item["what"] for item in openings]

    def withdraw(self, ids: Iterable[str], signer: Signer, *, reason: str) -> frozenset[str]:
        """Withdraw grants and segments of the own tenant permanently; returns those that are revoked by now."""
        body = {"ids": sorted(set(ids)), "reason": reason}
        return frozenset(self._send(ReleaseAction.REVOKED, "withdraw", body, signer)["revoked"])

    def _send(self, step: ReleaseAction, verb: str, body: dict[str, Any], signer: Signer) -> Any:
        stands = self._get("/v1/policies/release")
        if stands["audience"] != self._audience:
            raise ReleaseError(f"the control plane releases for `{stands['audience']}`, not `{self._audience}`")
        record = make_record(
            signer,
            step,
            body,
            number=stands["steps"] + 1,
            previous=stands["head"],
            audience=self._audience,
            at_us=max(self._clock.utc_us(), stands["last_us"]),
        )
        try:
            return self._connection.post(f"/v1/policies:{verb}", {"record": record.to_bytes().decode()})
        except ServiceError as error:
            raise ReleaseError(error.message) from None

    def _get(self, path: str, **query: Any) -> Any:
        try:
            return self._connection.get(path, **query)
        except ServiceError as error:
            raise ReleaseError(error.message) from None
