"""Identifiers that cross folders, as distinct types so that one is never passed for another."""

from __future__ import annotations

from typing import NewType

TenantId = NewType("TenantId", str)
SubjectId = NewType("SubjectId", str)
SessionId = NewType("SessionId", str)
RequestId = NewType("RequestId", str)
ResidencyId = NewType("ResidencyId", int)
BlockIndex = NewType("BlockIndex", int)
Generation = NewType("Generation", int)
PolicyRevision = NewType("PolicyRevision", int)
