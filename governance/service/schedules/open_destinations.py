"""Opens the destinations of the settings; an unusable one is an error when the service starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvcustody.errors import ConfigError
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.schedules.folder_delivery import FolderDelivery
from kvcustody.governance.service.schedules.parcel import Destination
from kvcustody.governance.service.schedules.s3_delivery import S3Delivery
from kvcustody.governance.service.schedules.webhook_delivery import WebhookDelivery
from kvcustody.governance.service.settings import ReportDestination, ReportFolder, ReportStore
from kvcustody.governance.tiers.stores.s3_requests import S3Key


def open_destinations(named: Sequence[ReportDestination]) -> dict[str, Destination]:
    """Open every destination by name; raises `ConfigError` or `SinkError`."""
    return {each.name: _opened(each) for each in named}


def may_receive(named: ReportDestination, of_tenant: str | None) -> bool:
    """Whether people of a tenant (None: of none) may have their reports delivered there."""
    return of_tenant is None or of_tenant in named.tenants


def may_hand_over(caller: Caller) -> bool:
    """Whether a person may have reports delivered at all: of a tenant's people, only its administrators."""
    return caller.tenant is None or Role.TENANT_ADMIN in caller.roles


def _opened(named: ReportDestination) -> Destination:
    if isinstance(named, ReportFolder):
        return FolderDelivery(named.name, named.path)
    if isinstance(named, ReportStore):
        key = S3Key(named.access_key_id, _secret(named.name, named.secret_path), named.region)
        return S3Delivery(named.name, named.endpoint, named.bucket, named.prefix, key)
    return WebhookDelivery(named.name, named.url, _secret(named.name, named.key_path))


def _secret(name: str, path: Path) -> bytes:
    try:
        if path.stat().st_mode & 0o077:
            raise ConfigError(f"report destination `{name}`: `{path}` is open to others; chmod 600 it")
        found = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"report destination `{name}`: `{path}`: {error.strerror}") from None
    if not found:
        raise ConfigError(f"report destination `{name}`: `{path}` is empty")
    return found
