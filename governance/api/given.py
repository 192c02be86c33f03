"""Arguments that the server gives to an operation's function; no caller states them.

An operation that only reads the ledger takes a desk: a service that is open, or the ledger itself. Others take the
service.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.operations.desk import Desk

if TYPE_CHECKING:
    from kvcustody.governance.service.service import Service
else:
    Service = Any  # who asks a ledger itself imports no service


class Given(NamedTuple):
    """A parameter that the server fills in, such as the caller or the service."""

    what: str  # `desk`, `service`, `caller` or `wire`


class Wire(NamedTuple):
    """The headers, address and TLS state of a call. A call without HTTP has neither TLS nor a certificate."""

    path: Mapping[str, str]  # what stands in its path for the names in the operation's
    query: Mapping[str, str]
    headers: Mapping[str, str]  # by their names in lower case
    body: bytes
    tls: bool = False
    certificate: str | None = None  # the thumbprint of the connection's client certificate


DeskDep = Annotated[Desk, Given("desk")]
ServiceDep = Annotated[Service, Given("service")]
CallerDep = Annotated[Caller, Given("caller")]
WireDep = Annotated[Wire, Given("wire")]
