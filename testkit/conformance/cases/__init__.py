"""Every case of the kit, by subject."""

from __future__ import annotations

from kvcustody.testkit.conformance.case import Case
from kvcustody.testkit.conformance.cases import (
    administration,
    evidence,
    fuzz,
    lifecycle,
    residue,
    scope,
    strangers,
    time,
)

ALL: tuple[Case, ...] = (
    *scope.CASES,
    *residue.CASES,
    *time.CASES,
    *administration.CASES,
    *lifecycle.CASES,
    *evidence.CASES,
    *strangers.CASES,
    *fuzz.CASES,
)
BY_NAME = {case.name: case for case in ALL}
assert len(BY_NAME) == len(ALL), "case names are unique"
