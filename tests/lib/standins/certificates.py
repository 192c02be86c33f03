"""Certificates of authorities that a test makes: of servers and of clients, in time or past it."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAY = datetime.timedelta(days=1)


class Pair(NamedTuple):
    """A certificate and its key, as files."""

    certificate: Path
    key: Path


class Authority:
    """Signs certificates; `pem` is what those who trust it hold."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        basic = x509.BasicConstraints(ca=True, path_length=0)
        made = self._builder(self._name, self._key.public_key()).add_extension(basic, critical=True)
        self.pem = folder / f"{name}.pem"
        self.pem.write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *, server: bool = False, ended: bool = False, both: bool = False) -> Pair:
        """`both`: of a server and of a client."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        uses = [ExtendedKeyUsageOID.SERVER_AUTH] if server or both else []
        uses += [] if server else [ExtendedKeyUsageOID.CLIENT_AUTH]
        here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        builder = self._builder(subject, key.public_key(), ended=ended)
        builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        builder = builder.add_extension(here, critical=False)
        pair = Pair(self._folder / f"{name}.crt", self._folder / f"{name}.tls")
        signed = builder.sign(self._key, hashes.SHA256())
        pair.certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        form = serialization.PrivateFormat.PKCS8
        pair.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
        pair.key.chmod(0o600)
        return pair

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, *, ended: bool = False
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self._name).public_key(key)
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - 2 * DAY)
        return builder.not_valid_after(now - DAY if ended else now + DAY)
