"""The ways in which a key ends."""

from __future__ import annotations

from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.governance.erasure.selector import Selector
from standins.governance.tier_place import Place


def of_the_tenant(place: Place, label: DomainLabel) -> None:
    assert label.spec is not None
    place.world.keyring.destroy(label.spec.owner, 1)
    place.tier.narrow()


def of_the_subject(place: Place, label: DomainLabel) -> None:
    place.tier.erase("e", Selector(label.tenant, label.subject), 0)


def of_the_bucket(place: Place, label: DomainLabel) -> None:
    for key in place.world.shred.living():
        if key.kind == "bucket":
            place.world.shred.destroy(key.id)
    place.tier.expire()


ENDS = {"tenant": of_the_tenant, "subject": of_the_subject, "bucket": of_the_bucket}
