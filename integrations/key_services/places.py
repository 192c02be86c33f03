"""The locations of key services, as documents state them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from kvcustody.http_exchange import is_loopback
from kvcustody.policies.document.yaml_document import YamlModel

Milliseconds = Annotated[int, Field(ge=1, le=60_000)]


class OpenBaoPlace(YamlModel):
    """The transit engine of OpenBao or HashiCorp Vault, at `mount`. Unencrypted access over a network is refused."""

    service: Literal["openbao", "vault"]
    address: str
    mount: Annotated[str, Field(pattern=r"^[A-Za-z0-9_./-]{1,128}$")] = "transit"
    namespace: str = ""
    token_path: Path
    certificate_authority: Path | None = None
    timeout_ms: Milliseconds = 2_000

    @field_validator("address")
    @classmethod
    def _address(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("is no address; write `https://HOST:PORT`")
        if parts.scheme == "http" and not is_loopback(parts.hostname):
            raise ValueError("would be used unencrypted over a network; write `https://`")
        return value.rstrip("/")


class Pkcs11Place(YamlModel):
    """A token of a hardware security module, through its PKCS#11 library."""

    service: Literal["pkcs11"]
    library: Path
    token: Annotated[str, Field(min_length=1, max_length=32)]
    pin_path: Path
    timeout_ms: Milliseconds = 5_000


class AwsPlace(YamlModel):
    """AWS KMS. Credentials are the machine's, as its SDK finds them."""

    service: Literal["aws-kms"]
    region: Annotated[str, Field(min_length=1, max_length=64)]
    endpoint: str | None = None
    destroy_days: Annotated[int, Field(ge=7, le=30)] = 7
    timeout_ms: Milliseconds = 5_000


class GooglePlace(YamlModel):
    """Cloud KMS: a key ring `projects/P/locations/L/keyRings/R`. Credentials are the machine's."""

    service: Literal["gcp-kms"]
    key_ring: Annotated[str, Field(pattern=r"^projects/[^/]+/locations/[^/]+/keyRings/[^/]+$")]
    destroy_days: Annotated[int, Field(ge=1, le=120)] = 1
    protection: Literal["SOFTWARE", "HSM"] = "HSM"
    timeout_ms: Milliseconds = 5_000


class AzurePlace(YamlModel):
    """Azure Key Vault or Managed HSM, by its address. Credentials are the machine's."""

    service: Literal["azure-key-vault"]
    address: Annotated[str, Field(pattern=r"^https://[^/]+/?$")]
    purge: bool = True
    timeout_ms: Milliseconds = 5_000


Place = Annotated[OpenBaoPlace | Pkcs11Place | AwsPlace | GooglePlace | AzurePlace, Field(discriminator="service")]
