"""The identity document: accepted credentials, and the source of each part of a principal.

1. Nothing is believed that the document does not name: no issuer, claim, header or path has a meaning by default,
   except the tables of `routes`.
2. Tenant, classification and route come from credentials or from the document, never from a header.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from kvcustody.errors import IdentityError
from kvcustody.governance.credentials.json_web_token import (
    ALGORITHMS,
    LEEWAY_SECONDS,
    Algorithm,
    LeewaySeconds,
)
from kvcustody.governance.edge.door_token import GROUP
from kvcustody.governance.identity.document_fields import GroupName, Identifier, RouteName
from kvcustody.governance.identity.principal import check_identifier
from kvcustody.integrations.identity.routes import SCOPED
from kvcustody.policies.document.yaml_document import YamlModel, read_model
from kvcustody.tenants import OWN

OWN_HEADERS = "x-kvcustody-"  # every header that begins so is ours: read here, and never passed on


def _own_header(value: str) -> str:
    name = value.lower()
    if not name.startswith(OWN_HEADERS) or name == f"{OWN_HEADERS}classification":
        raise ValueError("must be a header of the form `X-KVCustody-…`, and not `X-KVCustody-Classification`")
    if not name.removeprefix(OWN_HEADERS).replace("-", "").isalnum() or not name.isascii():
        raise ValueError("is not a header name")
    return name


HeaderName = Annotated[str, AfterValidator(_own_header)]
ClaimName = Annotated[str, Field(min_length=1, max_length=256)]
RelativePath = Annotated[str, Field(min_length=1)]


Role = Annotated[str, Field(pattern=r"^[a-z]{1,32}$")]


class Asserted(YamlModel):
    """Headers in which an authenticated tenant may name its user; without them it may not."""

    subject: HeaderName | None = None
    session: HeaderName | None = None


class ClaimNames(YamlModel):
    """The names of the claims that hold each part of a principal."""

    tenant: ClaimName
    subject: ClaimName | None = None
    session: ClaimName | None = None
    classification: ClaimName | None = None
    route: ClaimName | None = None

    def named(self) -> Iterator[tuple[str, str]]:
        """Yield each part that has a claim, with the claim's name."""
        for field in type(self).model_fields:
            claim = getattr(self, field)
            if claim is not None:
                yield field, claim


class IssuerEntry(YamlModel):
    """One issuer of JSON Web Tokens. `name` is its name in the ledger; a short one keeps tokens short."""

    issuer: Annotated[str, Field(min_length=1, max_length=512)]
    keys: RelativePath
    audience: Annotated[str, Field(min_length=1)]
    claims: ClaimNames
    name: Identifier | None = None
    tenants: tuple[Identifier, ...] | None = None
    algorithms: tuple[Algorithm, ...] = ALGORITHMS
    leeway_seconds: LeewaySeconds = LEEWAY_SECONDS
    asserted: Asserted = Asserted()

    @property
    def called(self) -> str:
        """The issuer in principals from this issuer."""
        return self.name or self.issuer

    @model_validator(mode="after")
    def _nameable(self) -> IssuerEntry:
        if self.called == OWN:
            raise ValueError(f"`{OWN}` is reserved for requests without an owner; choose another `name`")
        try:
            check_identifier("issuer", self.called)
        except IdentityError as error:
            raise ValueError(f"`issuer` {error.operands['reason']}; give it a `name`") from None
        return self


class ApiKeysEntry(YamlModel):
    """The file of API keys, and what their holders may assert."""

    path: RelativePath
    asserted: Asserted = Asserted()


class DoorsEntry(YamlModel):
    """Accepted doors in front of a router: their public keys, and this worker's group."""

    keys: RelativePath
    group: GroupName = GROUP


class IdentityDocument(YamlModel):
    """Who may send requests, and to which paths. Paths in it are relative to the document."""

    form: Literal["kvcustody/identity@1"] = Field(alias="schema")
    api_keys: ApiKeysEntry | None = None
    issuers: tuple[IssuerEntry, ...] = ()
    doors: DoorsEntry | None = None
    open_paths: tuple[RouteName, ...] = ("/health", "/ping", "/version")
    served_paths: tuple[RouteName, ...] = ()  # beside those of `routes`; requests pass without a scope token
    routes: dict[RouteName, RouteName] = Field(default_factory=dict)  # served path: route of the principal
    allow_transfer_parameters: bool = False
    # role of a chat message, or `tools`: the kind of content (`eviction.kinds`) that its tokens are marked with
    message_kinds: dict[Role, Identifier] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _usable(self) -> IdentityDocument:
        if self.api_keys is None and not self.issuers and self.doors is None:
            raise ValueError(
                "the document names neither `api_keys`, `issuers` nor `doors`, so every request would be refused"
            )
        if SCOPED.keys() & {*self.open_paths, *self.served_paths}:
            raise ValueError("`open_paths` and `served_paths` may not name a path to the engine")
        for field in ("issuer", "called"):
            values = [getattr(entry, field) for entry in self.issuers]
            if len(set(values)) != len(values):
                raise ValueError("`issuers`: two entries are equal")
        return self


def load_identity(path: Path) -> IdentityDocument:
    """Return the identity document in `path`.

    Raises:
        ConfigError: lists every error with file, line and column.
    """
    return read_model(IdentityDocument, path)
