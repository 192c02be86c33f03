"""What is given to an operation's function without anybody stating it.

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
    """A parameter that no caller states: whoever calls the operation gives it."""

    what: str  # `desk`, `service`, `caller` or `wire`


class Wire(NamedTuple):
    """What a call says, as it came. A call without HTTP has neither TLS nor a certificate."""

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
