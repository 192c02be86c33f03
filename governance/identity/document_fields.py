"""Types of the fields of identity documents: names of tenants, issuers and users, and routes."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from kvcustody.errors import IdentityError
from kvcustody.governance.identity.principal import check_identifier


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
RouteName = Annotated[str, AfterValidator(_route)]
