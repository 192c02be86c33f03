"""Types of the fields of identity and placement documents: names of tenants, issuers, users and groups, and routes."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from kvcustody.errors import IdentityError
from kvcustody.governance.identity.principal import check_identifier
from kvcustody.policies.document.model import NAME_PATTERN


def _identifier(value: str) -> str:
    try:
        return check_identifier("it", value)
    except IdentityError as error:
        raise ValueError(error.operands["reason"]) from None


def _route(value: str) -> str:
    if not _identifier(value).startswith("/"):
        raise ValueError("must begin with `/`")
    return value


Identifier = Annotated[str, AfterValidator(_identifier)]
GroupName = Annotated[str, Field(pattern=f"^{NAME_PATTERN}$")]
RouteName = Annotated[str, AfterValidator(_route)]
