"""Answers to requests with an `Idempotency-Key`: a repeated request gets the stored answer and is not executed again.

1. One key of one principal is one request: the same again gives the same bytes, another one is refused, and while the
   first runs the second has to wait.
2. A key is claimed in the database before the request runs. A request whose process died is taken over by its
   repetition; one that failed on our side leaves nothing, so that it can be repeated.
3. Answers are sealed under the key that the caller chose, which is not stored: an answer can hold a new API key.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from sqlalchemy import ColumnElement, Engine, delete, insert, select, type_coerce, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.types import NullType

from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.store.schema.service import service_answers
from kvcustody.audit.store.schema.stored_rows import stored_row
from kvcustody.clock import MICROSECONDS, Clock
from kvcustody.governance.credentials.service_secret import ServiceSecret, keyed_digest
from kvcustody.governance.service.problem_details import ProblemError

_NONCE_BYTES = 12
_LOST_AFTER_US = 600 * MICROSECONDS  # a request of another process that takes longer has died with it


class IdempotencyClaim(NamedTuple):
    """A key that this request holds until it is settled."""

    principal: str
    digest: str
    key: str


class IdempotencyStore:
    """The store of answers; `owner` names this process."""

    def __init__(self, engine: Engine, secret: ServiceSecret, clock: Clock, *, owner: str, hours: int) -> None:
        self._engine = engine
        self._key = secret.key("answers")
        self._seal_key = secret.key("answers-seal")
        self._clock = clock
        self._owner = owner
        self._kept_us = hours * 3600 * MICROSECONDS

    def claim(self, principal: str, key: str, request: bytes) -> IdempotencyClaim | bytes:
        """Return a claim to execute the request, or the first execution's answer.

        Raises `key-reused` where the key belongs to another request, `in-flight` while the first one runs.
        """
        claim = IdempotencyClaim(principal, keyed_digest(self._key, principal.encode(), key.encode()), key)
        wanted = keyed_digest(self._key, request)
        now_us = self._clock.utc_us()
        values = {"owner": self._owner, "begun_us": now_us, "finished": False, "sealed": None}
        try:
            with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
                old = service_answers.c.begun_us < now_us - self._kept_us
                connection.execute(delete(service_answers).where(old))
                row = {"principal": principal, "key": claim.digest, "request": wanted, **values}
                connection.execute(insert(service_answers).values(**row))
            return claim
        except IntegrityError:
            return self._known(claim, wanted, now_us)

    def _known(self, claim: IdempotencyClaim, wanted: str, now_us: int) -> IdempotencyClaim | bytes:
        with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
            columns = (column for column in service_answers.c if column is not service_answers.c.sealed)
            bytes_as_stored = type_coerce(service_answers.c.sealed, NullType()).label("sealed")
            row = stored_row(connection, select(*columns, bytes_as_stored).where(self._where(claim)))
            if row is None:  # its first run failed a moment ago
                raise _in_flight()
            if row.request != wanted:
                raise ProblemError("key-reused")
            if row.unread:
                raise _unreadable()
            if not row.finished:
                dead = row.owner != self._owner and now_us - row.begun_us > _LOST_AFTER_US
                if not dead:
                    raise _in_flight()
                taken = {"owner": self._owner, "begun_us": now_us}
                connection.execute(update(service_answers).where(self._where(claim)).values(**taken))
                return claim
        return self._open(claim, row.sealed)

    def settle(self, claim: IdempotencyClaim, answer: bytes) -> None:
        """Store the answer."""
        nonce = os.urandom(_NONCE_BYTES)
        sealed = nonce + AESGCM(self._cipher_key(claim)).encrypt(nonce, answer, claim.digest.encode())
        with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
            values = {"finished": True, "sealed": sealed}
            connection.execute(update(service_answers).where(self._where(claim)).values(**values))

    def give_up(self, claim: IdempotencyClaim) -> None:
        """Release the key, because the request failed on our side."""
        with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
            connection.execute(delete(service_answers).where(self._where(claim)))

    def free(self, names: list[str]) -> int:
        """Release the keys of ended processes, named by `owner`; returns their number."""
        where = service_answers.c.owner.in_(names) & service_answers.c.finished.is_(False)
        with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
            return connection.execute(delete(service_answers).where(where)).rowcount

    def _open(self, claim: IdempotencyClaim, sealed: object) -> bytes:
        if not isinstance(sealed, bytes):
            raise _unreadable()
        nonce, data = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
        try:
            return AESGCM(self._cipher_key(claim)).decrypt(nonce, data, claim.digest.encode())
        except (InvalidTag, ValueError):
            raise _unreadable() from None

    def _cipher_key(self, claim: IdempotencyClaim) -> bytes:
        return bytes.fromhex(keyed_digest(self._seal_key, claim.principal.encode(), claim.key.encode()))

    @staticmethod
    def _where(claim: IdempotencyClaim) -> ColumnElement[bool]:
        return (service_answers.c.principal == claim.principal) & (service_answers.c.key == claim.digest)


def _unreadable() -> ProblemError:
    return ProblemError("conflict", "the stored answer for this `Idempotency-Key` cannot be read")


def _in_flight() -> ProblemError:
    return ProblemError("in-flight", headers={"Retry-After": "1"})
