"""How a certificate is named: SHA-256 over its DER, base64url without padding (`x5t#S256`, RFC 8705).

A key or token that is bound to a certificate counts over connections with that certificate alone.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ssl
from pathlib import Path

from kvcustody.errors import ConfigError

CHARACTERS = 43
PATTERN = rf"^[A-Za-z0-9_-]{{{CHARACTERS}}}$"
_END = "-----END CERTIFICATE-----"
_BYTES_MAX = 1 << 20


def thumbprint_of(der: bytes) -> str:
    """The name of a certificate given as DER."""
    return base64.urlsafe_b64encode(hashlib.sha256(der).digest()).decode().rstrip("=")


def thumbprint_in(path: Path) -> str:
    """The name of the first certificate in a PEM file; raises `ConfigError` where there is none."""
    try:
        with path.open("rb") as file:
            text = file.read(_BYTES_MAX).decode("ascii", "replace")
        first = text[text.index("-----BEGIN CERTIFICATE-----") : text.index(_END) + len(_END)]
        return thumbprint_of(ssl.PEM_cert_to_DER_cert(first))
    except OSError as error:
        raise ConfigError(f"certificate `{path}`: {error.strerror}", path=path) from None
    except ValueError:
        raise ConfigError(f"certificate `{path}`: holds no PEM certificate", path=path) from None


def certificate_matches(bound: str | None, certificate: str | None) -> bool:
    """Whether a connection with this certificate may use what is bound so; constant time where it is bound."""
    return bound is None or (certificate is not None and hmac.compare_digest(bound.encode(), certificate.encode()))
