"""What changes and neither opens nor closes anything: shares of the pool, eviction, names and texts.

1. A tenant that one of the two does not list is compared with `tenants.default`, where there is one.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvcustody.policies.document.model import Policy, TenantPolicy
from kvcustody.policies.reading.sections import percent
from kvcustody.policies.workbench.diff.model import SettingChange


def setting_changes(old: Policy, new: Policy) -> Iterator[SettingChange]:
    """Every change, policy-wide first."""
    for field in ("name", "description", "issuers", "classifications", "eviction"):
        one, two = _plain(getattr(old, field)), _plain(getattr(new, field))
        if one != two:
            yield SettingChange("policy", field, one, two)
    yield from _tenants(old, new)
    for section in ("rules", "grants", "segments", "groups"):
        before = {entry.id: entry for entry in getattr(old, section)}
        after = {entry.id: entry for entry in getattr(new, section)}
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name):
                yield SettingChange(
                    section, name, _presence(before.get(name)), _presence(after.get(name), before.get(name))
                )


def _presence(entry: object, before: object = None) -> str:
    return "absent" if entry is None else "present" if before is None else "edited"


def _plain(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(str(item) for item in value)
    return str(value)


def _tenants(old: Policy, new: Policy) -> Iterator[SettingChange]:
    one = {tenant.id: tenant for tenant in (*old.tenants, *((old.default,) if old.default else ()))}
    two = {tenant.id: tenant for tenant in (*new.tenants, *((new.default,) if new.default else ()))}
    for name in sorted(one.keys() | two.keys()):
        before, after = _settings(one.get(name, old.default)), _settings(two.get(name, new.default))
        for field in before:
            if before[field] != after[field]:
                yield SettingChange(f"tenant {name}", field, before[field], after[field])


def _settings(tenant: TenantPolicy | None) -> dict[str, str]:
    if tenant is None:
        return dict.fromkeys(("guaranteed", "cap", "borrow", "group", "residencies", "tenants_max"), "refused")
    return {
        "guaranteed": percent(tenant.guaranteed),
        "cap": percent(tenant.cap),
        "borrow": str(tenant.borrow).lower(),
        "group": tenant.group or "none",
        "residencies": str(tenant.residencies or "the deployment's"),
        "tenants_max": str(tenant.tenants_max or "any"),
    }
