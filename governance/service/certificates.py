"""Erasure certificates of the service: over the ledger as it stands, under the ledger's own key.

1. Only the process that signs the ledger's checkpoints issues certificates.
2. The salt is derived from the erasure, so that a certificate that is issued again has the same commitment, and the
   opening fits both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcustody.audit.evidence.erasure import requests_and_answers as ledger
from kvcustody.audit.evidence.erasure.requests_and_answers import Requested, SelectorNames
from kvcustody.audit.reports.document import Document
from kvcustody.audit.reports.erasure.certificate import SelectorOpening, issue
from kvcustody.audit.tlog.proofs import ProofError
from kvcustody.audit.tlog.signing_key import SigningKey, read_signing_key
from kvcustody.governance.credentials.service_secret import keyed_digest
from kvcustody.governance.erasure.selector import Selector, selector_of
from kvcustody.governance.service.problem_details import ProblemError

if TYPE_CHECKING:
    from kvcustody.governance.service.service import Service


def certificate(service: Service, erasure: str) -> Document:
    """Return the certificate of an existing erasure; `unavailable` until a signed checkpoint covers its leaves."""
    key, opens = _signing_key(service), opening(service, erasure)
    try:
        return _issue(service, erasure, key, opens)
    except ProofError:
        service.cover()
        try:
            return _issue(service, erasure, key, opens)
        except ProofError:
            waits = "no signed checkpoint covers the newest leaves yet; ask again in a few seconds"
            raise ProblemError("unavailable", waits, headers={"Retry-After": "2"}) from None


def _issue(service: Service, erasure: str, key: SigningKey, opens: SelectorOpening) -> Document:
    with service.reading() as connection:
        return issue(connection, erasure, key, opens, now_us=service.clock.utc_us())


def opening(service: Service, erasure: str) -> SelectorOpening:
    """Return the opening of a certificate's commitment: it reveals the selector, and belongs to the requester."""
    salt = keyed_digest(service.secret.key("certificate-salt"), erasure.encode())
    with service.reading() as connection:
        asked = ledger.request(connection, erasure)
        return SelectorOpening(salt, _selector(asked, ledger.names(connection, asked, service.subject_keys)).text())


def _signing_key(service: Service) -> SigningKey:
    if service.signer is None:
        raise ProblemError("conflict", "another process signs this ledger; ask that one for certificates")
    return read_signing_key(service.settings.signing_key_path)


def _selector(asked: Requested, known: SelectorNames | None) -> Selector:
    """What was asked for, people by name where their link is still there."""
    who = asked if known is None else known
    return selector_of(asked.tenant, who.subject, who.session, asked.detail)
