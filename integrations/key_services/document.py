"""The document that names a key service, and the wrapping port over it: `root_key_source: plugin:key-service`.

    service: openbao
    address: https://bao.example:8200
    token_path: /run/secrets/bao-token
    certificate_authority: /etc/ssl/bao.pem

1. Credentials are in files of their own, read again with each connection; the document holds none.
2. Relative paths begin at the document's folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from kvcustody.errors import ConfigError
from kvcustody.governance.keys.service_wrapping import KeyService, ServiceWrapping
from kvcustody.governance.settings import Settings
from kvcustody.integrations.key_services.places import AwsPlace, GooglePlace, OpenBaoPlace, Pkcs11Place, Place
from kvcustody.policies.document.yaml_document import YamlModel, read_model


class KeyServiceDocument(YamlModel):
    """The document at the setting `key_service_path`. `outage_seconds`: how long tiers continue without an answer."""

    key_service: Place
    outage_seconds: Annotated[int, Field(ge=0, le=86_400)] = 900


def open_service(document: Path, place: Place) -> KeyService:
    """Return a document's service, before its first request.

    Raises:
        ConfigError: its library is missing.
    """
    folder = document.parent
    try:
        if isinstance(place, OpenBaoPlace):
            from kvcustody.integrations.key_services.openbao import OpenBaoTransit

            return OpenBaoTransit(place, folder)
        if isinstance(place, Pkcs11Place):
            from kvcustody.integrations.key_services.pkcs11_token import Pkcs11Token

            return Pkcs11Token(place, folder)
        if isinstance(place, AwsPlace):
            from kvcustody.integrations.key_services.aws_kms import AwsKms

            return AwsKms(place)
        if isinstance(place, GooglePlace):
            from kvcustody.integrations.key_services.google_kms import GoogleKms

            return GoogleKms(place)
        from kvcustody.integrations.key_services.azure_key_vault import AzureKeyVault

        return AzureKeyVault(place)
    except ImportError as error:
        raise ConfigError(
            f"{document}: service `{place.service}` needs `{error.name}`; install `kvcustody[{place.service}]`"
        ) from None


def open_wrapping(document: Path, root: Path) -> ServiceWrapping:
    """Return the wrapping port over a document's service; `root`: the file of the wrapped local root key."""
    read = read_model(KeyServiceDocument, document)
    return ServiceWrapping(open_service(document, read.key_service), root, outage_seconds=read.outage_seconds)


def from_settings(settings: Settings) -> ServiceWrapping:
    """Return the wrapping port that a worker's settings name."""
    return open_wrapping(settings.key_service_path, settings.root_key_path)
