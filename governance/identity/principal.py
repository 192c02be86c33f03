"""Who a request belongs to: an authenticated tenant, and a subject and session that can only narrow.

- No tenant, no `Principal`: a request without one never reaches admission.
- Every identifier is checked before anything is keyed, stored or compared by it. Nothing is ever repaired:
  no trimming, no case folding, no Unicode normalisation. Text that is not already in its normal form is
  refused.
- Missing and empty differ: missing is `None` and narrows reuse; empty is refused. Numbers are not
  identifiers.
- A subject or session comes from verified claims, or is asserted by the authenticated tenant and recorded
  as such. A verified claim cannot be contradicted by an asserted one.
- No subject: reuse stays in the session. No session either: nothing is reused across requests.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvcustody.errors import IdentityError
from kvcustody.ids import SessionId, SubjectId, TenantId
from kvcustody.tenants import SEPARATOR

CHARACTERS_MAX = 128

# Deliberately without `*` (the policy's wildcard), quotes, brackets, `%`, `$`, `;`, `\\` and every space.
_PLAIN = re.compile(r"[A-Za-z0-9._:@+=~,/!|'-]{1,128}")
_DOT_SEGMENT = re.compile(r"(?:^|/)\.{1,2}(?:/|$)")
_LETTER_CATEGORIES = frozenset({"Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Nd"})
# Letters and marks that render as nothing, so that two different ids would look alike.
_INVISIBLE = frozenset(
    map(chr, (0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x180B, 0x180C, 0x180D, 0x180F, 0x3164, 0xFFA0))
) | frozenset(map(chr, (*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))))


@dataclass(frozen=True, slots=True)
class Principal:
    """The identity of a request. Build it with `identify`, or directly from verified values."""

    issuer: str
    tenant: TenantId
    subject: SubjectId | None = None
    session: SessionId | None = None
    subject_asserted: bool = False
    session_asserted: bool = False
    classification: str | None = None
    route: str | None = None
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_identifier("issuer", self.issuer)
        check_identifier("tenant", self.tenant)
        if self.subject is not None:
            check_identifier("subject", self.subject)
        if self.session is not None:
            check_identifier("session", self.session)
        if self.classification is not None:
            check_identifier("classification", self.classification)
        if self.route is not None and not check_identifier("route", self.route).startswith("/"):
            raise IdentityError("route: must begin with `/`", field="route", reason="must begin with `/`")

        identity = (self.issuer, self.tenant, self.subject, self.session, self.classification, self.route)
        object.__setattr__(self, "_hash", hash((*identity, self.subject_asserted, self.session_asserted)))

    def __hash__(self) -> int:
        return self._hash


def identify(
    *,
    issuer: object,
    tenant: object,
    verified: Mapping[str, object] | None = None,
    asserted: Mapping[str, object] | None = None,
    route: object = None,
) -> Principal:
    """Return the principal of an authenticated request.

    `issuer` and `tenant` come from authentication, and `verified` from the claims of the same token (`subject`,
    `session`, `classification`). `asserted` comes from the tenant's statements in the request (`subject`, `session`). A
    key that is absent or `None` is missing; anything else must be a well-formed identifier.
    """
    if tenant is None:
        raise IdentityError("tenant: missing", field="tenant", reason="missing")
    if issuer is None:
        raise IdentityError("issuer: missing", field="issuer", reason="missing")
    verified, asserted = verified or {}, asserted or {}
    subject, subject_asserted = _claim("subject", verified, asserted)
    session, session_asserted = _claim("session", verified, asserted)
    classification = verified.get("classification")
    return Principal(
        issuer=check_identifier("issuer", issuer),
        tenant=TenantId(check_identifier("tenant", tenant)),
        subject=None if subject is None else SubjectId(subject),
        session=None if session is None else SessionId(session),
        subject_asserted=subject_asserted,
        session_asserted=session_asserted,
        classification=None if classification is None else check_identifier("classification", classification),
        route=None if route is None else check_identifier("route", route),
    )


def check_identifier(field: str, value: object) -> str:
    """Return a well-formed identifier unchanged; raises an `IdentityError` that does not quote a bad one."""
    if type(value) is not str:
        raise _refused(field, f"must be text, not `{type(value).__name__}`")
    if value.isascii():
        if _PLAIN.fullmatch(value) is None:
            raise _refused(field, _why_ascii(value))
    else:
        _check_unicode(field, value)
    if "." in value and _DOT_SEGMENT.search(value) is not None:
        raise _refused(field, "has a `.` or `..` path segment")
    return value


def check_tenant_name(name: object) -> str:
    """Return a name that `tenants.Issuers` can make unchanged; raises an `IdentityError` that does not quote a
    bad one.
    """
    if type(name) is not str:
        raise _refused("tenant", f"must be text, not `{type(name).__name__}`")
    tenant, separated, issuer = name.partition(SEPARATOR)
    check_identifier("tenant", tenant)
    if separated:
        check_identifier("issuer", issuer)
    return name


def _claim(name: str, verified: Mapping[str, object], asserted: Mapping[str, object]) -> tuple[str | None, bool]:
    """The claim's value and whether it was only asserted; verified wins and may not be contradicted."""
    of_token, of_tenant = verified.get(name), asserted.get(name)
    stated = None if of_tenant is None else check_identifier(name, of_tenant)
    if of_token is None:
        return stated, stated is not None
    claim = check_identifier(name, of_token)
    if stated is not None and stated != claim:
        raise _refused(name, "asserted value contradicts the verified claim")
    return claim, False


def _check_unicode(field: str, value: str) -> None:
    if len(value) > CHARACTERS_MAX:
        raise _refused(field, f"is longer than {CHARACTERS_MAX} characters")
    for character in value:
        plain = character.isascii() and _PLAIN.fullmatch(character) is not None
        category = unicodedata.category(character)
        if not plain and (category not in _LETTER_CATEGORIES or character in _INVISIBLE):
            raise _refused(field, f"has the character U+{ord(character):04X}, which identifiers may not contain")
    if unicodedata.category(value[0]).startswith("M"):
        raise _refused(field, "begins with a combining mark")
    if not unicodedata.is_normalized("NFC", value):
        raise _refused(field, "is not in Unicode normal form C")


def _why_ascii(value: str) -> str:
    if not value:
        return "is empty"
    if len(value) > CHARACTERS_MAX:
        return f"is longer than {CHARACTERS_MAX} characters"
    wrong = next(c for c in value if _PLAIN.fullmatch(c) is None)
    return f"has the character U+{ord(wrong):04X}, which identifiers may not contain"


def _refused(field: str, reason: str) -> IdentityError:
    return IdentityError(f"{field}: {reason}", field=field, reason=reason)
