"""The parcel of a scheduled report, and the port of its destinations.

1. Where reports may go is in the settings, by name: nobody makes the service write to a path, or ask an address, that
   its operator did not list.
2. `deliver` returns once the other side has everything, and says where it lies, without any secret. The same parcel a
   second time changes nothing. Anything else raises `SinkError`, whose text names the destination and no address.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

SCHEMA = "kvcustody/report-delivery@1"


class Parcel(NamedTuple):
    """A report's files under its folder's name, and its metadata."""

    report: str
    name: str
    facts: dict[str, object]
    files: dict[str, bytes]

    def ordered(self) -> list[tuple[str, bytes]]:
        """The files in order; report.json is last, because receivers wait for it."""
        return sorted(self.files.items(), key=lambda item: (item[0] == "report.json", item[0]))


class Destination(Protocol):
    """Takes parcels."""

    name: str
    kind: str

    def deliver(self, parcel: Parcel) -> str:
        """Deliver a parcel (rule 2)."""
