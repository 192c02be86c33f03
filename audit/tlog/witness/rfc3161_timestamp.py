"""RFC 3161: a timestamp authority certifies when a checkpoint existed. It complements witnesses and does not replace
them.

1. The SHA-512 digest of the signed checkpoint's text is stamped. A token proves "not later than", and nothing about
   forks.
2. A token counts only if it verifies, over this very text, against the authority's certificate and roots that the
   operator was given. A token that was just requested must also carry the nonce of the request.
3. Every call ends within its deadline. Needs `rfc3161-client` (`kvcustody[timestamp]`).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cryptography import x509
from sqlalchemy import Engine, insert, select

from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.store.schema.retention import timestamps
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.tlog.signed_note import parse_note
from kvcustody.errors import LedgerError
from kvcustody.http_exchange import exchange

_ANSWER_BYTES_MAX = 1 << 18


class TimestampError(LedgerError):
    """A timestamp authority cannot be reached, or its token does not verify."""

    code = "KVC660"


@dataclass(frozen=True, slots=True)
class TimestampAuthority:
    """A timestamp authority: its address, its own certificate, and the roots of its chain."""

    name: str
    url: str
    certificate: x509.Certificate
    roots: tuple[x509.Certificate, ...]

    @classmethod
    def load(cls, name: str, url: str, certificate: Path, roots: Path) -> TimestampAuthority:
        """Load the authority from PEM files; raises `TimestampError`."""
        try:
            own = x509.load_pem_x509_certificate(certificate.read_bytes())
            return cls(name, url, own, tuple(x509.load_pem_x509_certificates(roots.read_bytes())))
        except (OSError, ValueError) as problem:
            raise TimestampError(f"the certificates of authority `{name}` cannot be read: {problem}") from None

    def stamped_at_us(self, token: bytes, text: bytes) -> int | None:
        """Return when, by its token, the text existed (UTC µs); None if this is not its token over the text."""
        _client()  # whether it is installed is no matter of the token
        try:
            return check(self, token, text)
        except TimestampError:
            return None


def stamp(engine: Engine, authority: TimestampAuthority, *, timeout_seconds: float = 10.0) -> tuple[int, int]:
    """Timestamp the newest signed checkpoint and store the token; return its size and the stated time (µs UTC).

    Raises `TimestampError`, or `ProofError` where nothing is signed. What is stamped already is not asked for again.
    """
    with engine.connect() as connection:
        note = LedgerProofs(connection).signed()
        column = timestamps.c
        known = connection.scalar(
            select(column.at_us).where(column.size == note.size, column.authority == authority.name)
        )
    if known is not None:
        return note.size, int(known)
    token, at_us = ask(authority, parse_note(note.note).text.encode(), timeout_seconds=timeout_seconds)
    values = {"size": note.size, "authority": authority.name, "token": token, "at_us": at_us}
    with engine.connect().execution_options(**WRITE) as connection, connection.begin():
        connection.execute(insert(timestamps).values(values))
    return note.size, at_us


def ask(authority: TimestampAuthority, message: bytes, *, timeout_seconds: float) -> tuple[bytes, int]:
    """Return a fresh token over the message and its stated time; raises `TimestampError` (rule 2, rule 3)."""
    client = _client()
    request = client.TimestampRequestBuilder().data(message).nonce(nonce=True).build()
    token = _post(authority, request.as_bytes(), timeout_seconds)
    return token, check(authority, token, message, nonce=request.nonce)


def check(authority: TimestampAuthority, token: bytes, message: bytes, *, nonce: int | None = None) -> int:
    """Return the time (µs UTC) that a token states; raises `TimestampError` unless it verifies (rule 2)."""
    client = _client()
    try:
        answer = client.decode_timestamp_response(token)
        builder = client.VerifierBuilder(
            tsa_certificate=authority.certificate, roots=list(authority.roots), nonce=nonce
        )
        builder.build().verify_message(answer, message)
        moment: datetime = answer.tst_info.gen_time
    except Exception as problem:  # a hostile token may upset any parser
        reason = " ".join(str(problem).split())[:200]
        raise TimestampError(
            f"the token of `{authority.name}` does not verify: {reason}", name=authority.name
        ) from None
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return int(aware.timestamp()) * 1_000_000 + aware.microsecond


def _post(authority: TimestampAuthority, body: bytes, timeout_seconds: float) -> bytes:
    parts = urlsplit(authority.url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise TimestampError(f"authority `{authority.name}` has the address `{authority.url}`")
    headers = {"Content-Type": "application/timestamp-query"}
    try:
        answer = exchange(
            "POST",
            authority.url,
            body,
            headers,
            deadline_seconds=timeout_seconds,
            bytes_max=_ANSWER_BYTES_MAX,
        )
    except OSError as problem:
        raise TimestampError(f"authority `{authority.name}`: {problem}", name=authority.name) from None
    if answer.status != 200:
        raise TimestampError(f"authority `{authority.name}` answered {answer.status}", name=authority.name)
    return answer.body


def _client() -> Any:
    try:
        import rfc3161_client
    except ImportError:
        raise TimestampError("timestamps need rfc3161-client: install `kvcustody[timestamp]`") from None
    return rfc3161_client
