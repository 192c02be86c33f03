"""Principals, keys and sessions, as the API shows them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvcustody.governance.api.models.base import Model, TenantName, Unread, Utc, example
from kvcustody.governance.credentials.certificate_thumbprint import PATTERN
from kvcustody.governance.service.access.roles import Role

_ALICE = {
    "name": "alice",
    "kind": "person",
    "roles": ["auditor"],
    "tenant": None,
    "enrolled_us": 1_780_000_000_000_000,
    "enrolled_by": "bootstrap",
    "disabled_us": None,
    "version": 1,
    "unread": "",
}
_KEY = {"prefix": "0f1e2d3c4b5a", "key": "kvcs_0f1e2d3c4b5a_…", "expires_us": 1_787_776_000_000_000}


Thumbprint = Annotated[
    str,
    Field(
        pattern=PATTERN,
        description="For a worker: the client certificate that the key is bound to, as `x5t#S256` (RFC 8705).",
        examples=["bwcK0esc3ACC3DB2Y5_lESsXE8o9ltc05O89jdN-dg2"],
    ),
]


class Whoami(Model):
    """The caller, as the service identified it."""

    model_config = example(
        {
            "name": "alice",
            "roles": ["auditor"],
            "tenant": None,
            "by": "key",
            "actions": {"custody.read": "all"},
        }
    )

    name: str
    roles: list[Role]
    tenant: str | None
    by: Literal["key", "token", "session", "local"]
    actions: dict[str, Literal["own", "all"]]


class Enrolment(Model):
    """A principal to enrol."""

    model_config = example({"name": "alice", "roles": ["auditor"]})

    name: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]*$")]
    roles: Annotated[list[Role], Field(min_length=1, max_length=8)]
    tenant: TenantName | None = None
    kind: Literal["person", "machine"] = "person"
    key_days: Annotated[int | None, Field(strict=True, ge=1, le=366)] = None
    certificate: Thumbprint | None = None


class PrincipalModel(Model):
    """Somebody who may call the API. `token`: a principal of a token issuer, listed here because it was
    disabled here.
    """

    model_config = example(_ALICE)

    name: str
    kind: Literal["person", "machine", "token"]
    roles: list[Role]
    tenant: str | None
    enrolled_us: Utc
    enrolled_by: str
    disabled_us: Utc | None
    version: int
    unread: Unread


class IssuedKeyModel(Model):
    """A new key. It is shown once and not stored."""

    model_config = example(_KEY)

    prefix: str
    key: str
    expires_us: Utc


class Enrolled(Model):
    """A new principal and its first key."""

    model_config = example({"principal": _ALICE, "key": _KEY})

    principal: PrincipalModel
    key: IssuedKeyModel


class ApiKeyModel(Model):
    """The public facts of a key. `made_with`: prefix of the key together with which it ends, or null.

    `in_session`: it was made in a session, and ends with that. One with neither stands alone.
    """

    model_config = example(
        {
            "prefix": "0f1e2d3c4b5a",
            "principal": "alice",
            "issued_us": 1_780_000_000_000_000,
            "expires_us": 1_787_776_000_000_000,
            "used_us": None,
            "revoked_us": None,
            "certificate": None,
            "made_with": None,
            "in_session": False,
            "unread": "",
        }
    )

    prefix: str
    principal: str
    issued_us: Utc
    expires_us: Utc
    used_us: Utc | None
    revoked_us: Utc | None
    certificate: str | None
    made_with: str | None
    in_session: bool
    unread: Unread


class ApiKeyPage(Model):
    """Keys, newest first."""

    items: list[ApiKeyModel]


class EndedKeys(ApiKeyPage):
    """The keys of a principal after some were ended, newest first."""

    principal: str


class PrincipalPage(Model):
    """A page of principals."""

    items: list[PrincipalModel]
    next: str | None


class RotationModel(Model):
    """How to replace your own key. `bind`: to the client certificate of this connection, for a worker."""

    model_config = example({"days": 90, "overlap_days": 1})

    bind: Annotated[bool, Field(strict=True)] = False
    days: Annotated[int, Field(strict=True, ge=1, le=366)] = 90
    overlap_days: Annotated[int, Field(strict=True, ge=0, le=30)] = 1


class KeyRequest(Model):
    """How long a new key is valid, and the certificate that it is bound to; without one, any connection may use it.

    `overlap_days`: days until the principal's other keys end; without it they stay. A key that replaces others and
    names no certificate is bound as the newest of them.
    """

    model_config = example({"days": 90})

    days: Annotated[int, Field(strict=True, ge=1, le=366)] = 90
    certificate: Thumbprint | None = None
    overlap_days: Annotated[int | None, Field(strict=True, ge=0, le=30)] = None


class PrincipalName(Model):
    """The name of a principal: of an enrolled one, or `issuer:name` for one of a token issuer."""

    model_config = example({"name": "alice"})

    name: Annotated[str, Field(min_length=1, max_length=128)]


class Ending(PrincipalName):
    """The principal to disable. `allow_last`: even the last one that manages keys."""

    model_config = example({"name": "alice", "allow_last": False})

    allow_last: Annotated[bool, Field(strict=True)] = False


class KeyEnding(Model):
    """The keys to refuse from now on: one by its prefix (any principal's, or that of `name`), or all of `name`."""

    model_config = example({"name": "alice", "prefix": "0f1e2d3c4b5a"})

    name: Annotated[str | None, Field(min_length=1, max_length=128)] = None
    prefix: Annotated[str | None, Field(pattern=r"^[0-9a-f]{12}$")] = None
    allow_last: Annotated[bool, Field(strict=True)] = False

    @model_validator(mode="after")
    def _names_one(self) -> KeyEnding:
        if self.name is None and self.prefix is None:
            raise ValueError("`name` or `prefix` is needed")
        return self


class KeyKeeping(PrincipalName):
    """A key that is to stand alone, its principal, and its remaining days."""

    model_config = example({"name": "alice", "prefix": "0f1e2d3c4b5a", "days": 90})

    prefix: Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]
    days: Annotated[int, Field(strict=True, ge=1, le=366)] = 90


class Session(Model):
    """A session that just began; its cookie is set. Send `csrf` as `X-CSRF-Token` with every act."""

    model_config = example({"csrf": "6b1f…", "expires_us": 1_780_028_800_000_000})

    csrf: str
    expires_us: Utc


class VersionModel(Model):
    """The versions of this service and its parts."""

    model_config = example({"kvcustody": "0.1.0", "api": "v1", "schema": "0007", "python": "3.12.3"})

    kvcustody: str
    api: Literal["v1"]
    schema_: Annotated[str, Field(alias="schema")]
    python: str


class OpenApiDocument(BaseModel):
    """An OpenAPI document."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"examples": [{"openapi": "3.1.0"}]})

    openapi: str
