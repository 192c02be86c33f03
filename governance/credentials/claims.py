"""A claim of a verified token by its name in the settings, and the names that its value gives.

1. A name with dots is a path through objects (`realm_access.roles`); `\\.` is a dot of the name itself. A name that is
   an address (`https://example.com/roles`) is one name.
2. A list gives its texts; an object of objects gives its keys, as Keycloak's `organization` and ZITADEL's roles do.
"""

from __future__ import annotations

import re
from typing import Any

from kvcustody.errors import credential_refused as refused

_DOT = re.compile(r"(?<!\\)\.")


def claim_at(claims: dict[str, Any], name: str) -> Any:
    """The value of the claim; None where the token has no such claim."""
    value: Any = claims
    for step in [name] if "://" in name else _DOT.split(name):
        value = value.get(step.replace("\\.", ".")) if isinstance(value, dict) else None
    return value


def claim_text(claims: dict[str, Any], name: str) -> str | None:
    """The text that the claim gives; raises `IdentityError` where it is of another form."""
    value = claim_at(claims, name)
    if value is not None and type(value) is not str:
        raise refused(f"claim `{name}` is not text")
    return value


def claim_names(claims: dict[str, Any], name: str) -> list[str]:
    """The names that the claim gives (rule 2); raises `IdentityError` where it is of another form."""
    value = claim_at(claims, name)
    if value is None:
        return []
    if isinstance(value, str):
        return value.split()
    if isinstance(value, dict) and all(isinstance(item, dict) for item in value.values()):
        return list(value)
    if isinstance(value, list):
        return [item for item in value if isinstance(item, str)]
    raise refused(f"claim `{name}` is not a list")


def claim_name(claims: dict[str, Any], name: str) -> str | None:
    """The one name that the claim gives; raises `IdentityError` where it gives several."""
    value = claim_at(claims, name)
    if value is None or isinstance(value, str):
        return value
    names = claim_names(claims, name)
    if len(value) != 1 or len(names) != 1:
        raise refused(f"claim `{name}` does not give one name")
    return names[0]
