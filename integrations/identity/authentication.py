"""The result of checking a credential, and the interface of every authenticator."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from kvcustody.governance.edge.door_token import PresentedToken


class Authenticated(NamedTuple):
    """What a credential proves, before the request's own statements."""

    issuer: str
    tenant: str
    subject: str | None = None
    session: str | None = None
    classification: str | None = None
    route: str | None = None
    subject_header: str | None = None  # where the tenant may assert a subject, lower case; `None`: nowhere
    session_header: str | None = None
    operator: bool = False  # may also use the paths that tenants may not
    token: PresentedToken | None = None  # a door before a router vouches for the whole principal


class Authenticator(Protocol):
    """Checks one kind of credential."""

    def accepts(self, credential: str) -> bool:
        """Return whether `credential` looks like this kind, which does not mean that it is valid."""

    def authenticate(self, credential: str) -> Authenticated:
        """Return what `credential` proves.

        Raises:
            IdentityError: it proves nothing; the `reason` is for the log only.
        """
