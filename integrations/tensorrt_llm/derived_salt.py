"""The `cache_salt` for the engine: it names a request's owner, made with our secrets, for a limited time.

    salt = salts.derive(chunks, principal, hints, model)    # 161 characters, in place of what the caller sent
    standing = salts.standing(chunks, salt)                 # in the scheduler half: whose it is, and whether it holds

1. It names four things under a secret of this process: the domain (as `ScopeSalts` does), the subject's shred key, the
   domain's erase epochs, and a period of time. Nobody else can make one. A salt from the caller, from another process
   or from an earlier one is not ours.
2. The engine reuses its own blocks only under the same salt. So its reuse ends with the period, which is half of what
   policy gives. It also ends with an erasure of the subject, because later requests have another salt. In `strict`, and
   where policy permits no reuse, each request has its own salt, and all reuse comes from our tiers.
3. A salt of the last period, but no older one, is still valid, because requests wait. It is invalid while the custody
   lease is over, and once an epoch of its domain was raised. A request that was admitted before the raise and attaches
   after it finds nothing in a tier. The engine looks up its own blocks under that salt before it asks us; only another
   salt ends that.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import NamedTuple

from kvcustody.errors import IdentityError
from kvcustody.governance.decisions.access_plan import DomainLabel, is_withheld, label_of, owed_by
from kvcustody.governance.governor.governor import Governor
from kvcustody.governance.identity.model_identity import ModelIdentity
from kvcustody.governance.identity.principal import Principal
from kvcustody.governance.request import NO_HINTS, Hints
from kvcustody.governance.tiers.copies.index import shred_name
from kvcustody.governance.tiers.scope_salts import SALT_DIGITS, ScopeSalts
from kvcustody.integrations.lmcache.custody_thread import Chunks

_SUBJECT_DIGITS, _EPOCH_DIGITS, _PERIOD_DIGITS, _TAG_DIGITS = 16, 16, 32, 32
_PERIOD, _ONCE = "w", "o"
DERIVED_CHARACTERS = SALT_DIGITS + _SUBJECT_DIGITS + _EPOCH_DIGITS + 1 + _PERIOD_DIGITS + _TAG_DIGITS


class Standing(NamedTuple):
    """What one of our salts says. `label` None: nothing is stored or found.

    `holds` False: its time, key or epoch is over, or the custody lease is.
    """

    domain: str
    label: DomainLabel | None
    subject: bytes
    holds: bool
    once: bool


class DerivedSalts:
    """Salts of one engine process. Used on the custody thread."""

    def __init__(self, *, reuses_on_device: bool) -> None:
        self._reuses = reuses_on_device
        self._secret = secrets.token_bytes(32)

    def derive(self, chunks: Chunks, principal: Principal, model: ModelIdentity, hints: Hints = NO_HINTS) -> str:
        """Return the salt for a request that arrives now.

        Raises:
            IdentityError: the policy admits no such tenant.
        """
        governor = chunks.governor
        plan = governor.plan_of(principal, model, None, hints)
        if plan is None:
            raise IdentityError(f"tenant `{principal.tenant}` is not in the policy", tenant=principal.tenant)
        label = label_of(plan.own.domain)
        if plan.own.state is None or label.spec is None or not governor.reads_own(plan):
            return self._signed(ScopeSalts.once(), "0" * (_SUBJECT_DIGITS + _EPOCH_DIGITS), self._once())
        domain = ScopeSalts(chunks.keys, chunks.directory).of(label)
        width_us = _width_us(governor, label)
        reuses = self._reuses and width_us > 0
        period = self._period(governor.clock.now_us() // width_us) if reuses else self._once()
        whose = _subject_digits(_subject(chunks, label)) + _epoch_digits(governor, label)
        return self._signed(domain, whose, period)

    def standing(self, chunks: Chunks, salt: object) -> Standing | None:
        """Return a salt's owner; None where it is none of ours."""
        if not isinstance(salt, str) or len(salt) != DERIVED_CHARACTERS:
            return None
        said = salt[:-_TAG_DIGITS]
        if not salt.isascii() or not hmac.compare_digest(salt[-_TAG_DIGITS:], self._tag(said)):
            return None
        domain, rest = said[:SALT_DIGITS], said[SALT_DIGITS:]
        subject_digits, rest = rest[:_SUBJECT_DIGITS], rest[_SUBJECT_DIGITS:]
        epoch_digits, kind, period = rest[:_EPOCH_DIGITS], rest[_EPOCH_DIGITS], rest[_EPOCH_DIGITS + 1 :]
        once = kind == _ONCE
        label = chunks.directory.label_of(domain)
        if label is None:
            return Standing(domain, None, b"", True, once)
        subject = _subject(chunks, label)
        holds = subject_digits == _subject_digits(subject)
        governor = chunks.governor
        holds = holds and not is_withheld(label, governor.restricted)
        holds = holds and epoch_digits == _epoch_digits(governor, label)
        holds = holds and not governor.custody.is_over(governor.clock.now_us())
        if not once:
            width_us = _width_us(governor, label)
            holds = holds and width_us > 0 and governor.clock.now_us() // width_us - int(period, 16) <= 1
        return Standing(domain, label, subject, holds, once)

    @staticmethod
    def _once() -> str:
        return _ONCE + secrets.token_hex(_PERIOD_DIGITS // 2)

    @staticmethod
    def _period(number: int) -> str:
        return f"{_PERIOD}{number:0{_PERIOD_DIGITS}x}"

    def _signed(self, domain: str, whose: str, period: str) -> str:
        said = domain + whose + period
        return said + self._tag(said)

    def _tag(self, said: str) -> str:
        return hashlib.blake2b(said.encode(), digest_size=_TAG_DIGITS // 2, key=self._secret).hexdigest()


def _subject(chunks: Chunks, label: DomainLabel) -> bytes:
    return chunks.shred.of_subject(shred_name(label.tenant, label.subject), label.tenant).id


def _subject_digits(subject: bytes) -> str:
    return hashlib.blake2b(subject, digest_size=_SUBJECT_DIGITS // 2, person=b"kvcustody salt").hexdigest()


def _epoch_digits(governor: Governor, label: DomainLabel) -> str:
    """Return the digits of the domain's current erase epochs; a tenant-wide domain uses only fleet and tenant."""
    spec = label.spec
    assert spec is not None and spec.issuer is not None and spec.tenant is not None, "it is somebody's own domain"
    epochs = governor.epochs.of(spec.issuer, spec.tenant, spec.subject, spec.session)
    if spec.subject is None and spec.session is None:
        epochs = epochs._replace(private=0)
    said = " ".join(map(str, epochs)).encode()
    return hashlib.blake2b(said, digest_size=_EPOCH_DIGITS // 2, person=b"kvcustody epoch").hexdigest()


def _width_us(governor: Governor, label: DomainLabel) -> int:
    """Return half of a block's reuse time: a block found under the last period is no older."""
    owed = owed_by(governor.table, label.tenant, label.level)
    return min(owed.idle_us, owed.absolute_us) // 2
