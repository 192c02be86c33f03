"""Checks of a service's settings: its folders, keys, certificates, address and destinations."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

from cryptography import x509

from kvcustody.audit.tlog.signing_key import read_signing_key
from kvcustody.console.doctor.findings import (
    Diagnosis,
    Examined,
    check,
    open_to_others,
    problem,
    service_check,
    settings_check,
    skipped,
    warning,
)
from kvcustody.governance.release.order_signing import read_signed_orders
from kvcustody.governance.release.trust import read_trust
from kvcustody.governance.service.settings import ReportStore, ReportWebhook, ServiceSettings, address
from kvcustody.plurals import several
from kvcustody.times import DAY_US, SECOND_US

_RENEW_DAYS = 30
_SOCKET_PATH_BYTES = 107  # of sockaddr_un, without the last zero
_KEY_BYTES = 24  # Standard Webhooks


@service_check("state-folder", "only the service's user can access its folder")
def state_folder(_subject: Examined, service: ServiceSettings) -> Iterator[Diagnosis]:
    """Check the state folder, which holds the service's secret and its spill."""
    if service.state_path.exists():
        yield from open_to_others(service.state_path, "chmod 700 it")


@settings_check("signing-keys", "the signing keys exist, and others cannot access them")
def signing_keys(subject: Examined, _settings: object) -> Iterator[Diagnosis]:
    """Check the signing keys: a missing key is created only where the ledger has none yet."""
    reports = [] if subject.service is None else [subject.service.report_key_file]
    for path in (*subject.signing_keys, *reports):
        if path.exists():
            read_signing_key(path)
    yield from ()


@check("certificates", "certificates are valid, and belong to their keys")
def certificates(subject: Examined) -> Iterator[Diagnosis]:
    """Check each certificate that the settings name, for the next 30 days."""
    named: list[tuple[Path | None, Path | None]] = []
    if (service := subject.service) is not None:
        named += [
            (service.tls_certificate_path, service.tls_key_path),
            (service.tls_client_ca_path, None),
        ]
    if (worker := subject.worker) is not None:
        named += [
            (worker.control_plane_certificate_path, worker.control_plane_certificate_key_path),
            (worker.control_plane_ca_path, None),
            (worker.nats_ca_path, None),
            (worker.handover_certificate_path, worker.handover_certificate_key_path),
            (worker.handover_ca_path, None),
        ]
    pairs = [(path, key) for path, key in named if path is not None]
    if not pairs:
        yield skipped("the settings name no certificate")
    for path, key in pairs:
        yield from _certificate(path, key, subject.clock.utc_us())


def _certificate(path: Path, key: Path | None, now_us: int) -> Iterator[Diagnosis]:
    try:
        parsed = x509.load_pem_x509_certificates(path.read_bytes())
    except ValueError:
        yield problem(f"`{path}` holds no certificate in PEM", "give a PEM file")
        return
    for certificate in parsed:
        days = (int(certificate.not_valid_after_utc.timestamp()) * SECOND_US - now_us) / DAY_US
        name = certificate.subject.rfc4514_string() or "a certificate"
        if days < 0:
            yield problem(f"`{path}`: {name} ended {several(round(-days), 'day')} ago", "renew it")
        elif days < _RENEW_DAYS:
            yield warning(f"`{path}`: {name} ends in {several(round(days), 'day')}", "renew it; no restart is needed")
    if key is None:
        return
    yield from open_to_others(key, "chmod 600 it, and replace the key")
    if b"ENCRYPTED" in key.read_bytes():  # OpenSSL would ask for it at the terminal, and wait
        yield problem(
            f"`{key}` is protected by a password, which the service cannot enter", "write it there without one"
        )
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(path, key)
    except ssl.SSLError as error:
        reason = str(error.reason or "cannot be used").lower().replace("_", " ")
        yield problem(f"`{key}` is not the key of `{path}` ({reason})", "put the pair there together")


@service_check("address", "the service can listen at its address")
def listening(_subject: Examined, service: ServiceSettings) -> Iterator[Diagnosis]:
    """Check the address: one in use prevents a start, unless a running service of these settings has it."""
    for where in filter(None, (service.listen, service.workers_listen)):
        host, place = address(where)
        if host is None:
            length = len(str(place).encode())
            if length > _SOCKET_PATH_BYTES:
                yield problem(
                    f"the socket's path has {length} bytes, and {_SOCKET_PATH_BYTES} are possible",
                    "choose a shorter path for `listen`",
                )
            continue
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, int(place)))
            except OSError as error:
                yield warning(
                    f"`{where}` cannot be bound ({error.strerror})",
                    "ignore this where the service runs; else choose another address, or stop the process that has it",
                )


@service_check("destination-keys", "keys of webhooks and stores exist, and others cannot access them")
def destination_keys(_subject: Examined, service: ServiceSettings) -> Iterator[Diagnosis]:
    """Check the destinations' keys: each is a file of mode 0600; a webhook's has 24 bytes or more."""
    for name, path in _key_files(service):
        if not path.exists():
            yield problem(f"{name}: `{path}` does not exist", "write its key there, mode 0600")
            continue
        yield from open_to_others(path)
        if name.startswith("webhook") and len(path.read_bytes().strip()) < _KEY_BYTES:
            yield problem(f"{name}: the key in `{path}` is shorter than {_KEY_BYTES} bytes", "make a longer one")


def _key_files(service: ServiceSettings) -> Iterator[tuple[str, Path]]:
    for webhook in service.webhooks:
        yield f"webhook `{webhook.name}`", webhook.key_path
    if service.inbox_webhook is not None:
        yield "webhook of the inbox", service.inbox_webhook.key_path
    if service.inbox_mail is not None and service.inbox_mail.password_path is not None:
        yield "mail of the inbox", service.inbox_mail.password_path
    for destination in service.report_destinations:
        if isinstance(destination, ReportWebhook):
            yield f"webhook `{destination.name}`", destination.key_path
        elif isinstance(destination, ReportStore):
            yield f"store `{destination.name}`", destination.secret_path


@check("policy-trust", "policies and orders are signed by keys that are trusted")
def policy_trust(subject: Examined) -> Iterator[Diagnosis]:
    """Check the trust configuration and the order key: without them no policy is released and no order written."""
    trusting = [settings for settings in subject.settings if settings.policy_trust]
    if not trusting:
        yield skipped("the settings name no trust configuration (`policy_trust`)")
    for settings in trusting:
        path = Path(str(settings.policy_trust))
        read_trust(path)
        read_signed_orders(path, settings.ledger_origin, settings.order_key_path)
        if settings.order_key_path is None:
            yield warning(
                f"orders are refused: `{path}` is in force, and no `order_key_path` is set",
                "set it, or leave erasures to a process that has one",
            )
