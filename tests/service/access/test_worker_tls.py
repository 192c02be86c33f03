"""Workers over mutual TLS: who may hand in, by certificate and key; certificates are real and made here."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from cryptography import x509

from kvcustody.errors import ConfigError, CustodyError, ServiceError
from kvcustody.governance.control_plane.connection import ControlPlaneConnection
from kvcustody.governance.credentials.certificate_thumbprint import thumbprint_in
from kvcustody.governance.service.problem_details import ProblemError
from standins.certificates import Authority, Pair
from standins.service.control_plane_world import ControlPlane, opened

pytestmark = pytest.mark.system("a worker without a certificate of ours is served")


class Walled(NamedTuple):
    """A control plane whose workers' address demands certificates."""

    plane: ControlPlane
    workers: str
    ours: Authority
    certificates: dict[str, Pair | None]


@pytest.fixture(scope="module")
def walled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walled]:
    folder = tmp_path_factory.mktemp("tls")
    ours, others = Authority(folder, "ours"), Authority(folder, "others")
    server = ours.issue("server", server=True)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    certificates = {
        "its own": ours.issue("gpu-0"),
        "another of ours": ours.issue("gpu-1"),
        "none": None,
        "another authority's": others.issue("gpu-x"),
        "one that has ended": ours.issue("gpu-old", ended=True),
        "a server's": server,
    }
    plane = ControlPlane(
        folder,
        workers_listen=f"127.0.0.1:{port}",
        tls_certificate_path=str(server.certificate),
        tls_key_path=str(server.key),
        tls_client_ca_path=str(ours.pem),
    )
    plane.address = f"https://127.0.0.1:{port}"
    yield Walled(plane, plane.address, ours, certificates)
    plane.end()


def connect(
    walled: Walled, whose: str, *, authority: Path | None = None, key: str | None = None
) -> ControlPlaneConnection:
    pair = walled.certificates[whose]
    files = {} if pair is None else {"certificate": pair.certificate, "certificate_key": pair.key}
    key = key or walled.plane.keys["gpu-0"]
    return ControlPlaneConnection(walled.workers, key, authority=authority or walled.ours.pem, **files)


def register(connection: ControlPlaneConnection) -> bool:
    with connection:
        path = f"/v1/worker/incarnations/{uuid.uuid4().hex}"
        return bool(connection.put(path, {"offset_us": 1})["new"])


@pytest.mark.parametrize("whose", ["none", "another authority's", "one that has ended", "a server's"])
def test_a_worker_without_a_certificate_of_ours_is_refused_whatever_its_key(walled: Walled, whose: str) -> None:
    with pytest.raises(ServiceError) as refused:
        register(connect(walled, whose))
    # Under TLS 1.3 the server's alert may come behind the end of the connection.
    assert refused.value.operands["problem"] in ("tls", "unreachable")
    assert register(connect(walled, "its own"))  # control: the same key with its certificate


def test_a_certificate_is_no_key_and_opens_nothing_else(walled: Walled) -> None:
    connection = connect(walled, "its own")
    connection._client.headers["Authorization"] = "Bearer none"
    with pytest.raises(ServiceError, match="No valid credential"):
        register(connection)
    with connect(walled, "its own") as worker, pytest.raises(ServiceError, match="Nothing here"):
        worker.get("/v1/whoami")  # what is no worker's operation is not served here


@pytest.fixture(scope="module")
def bound(walled: Walled) -> str:
    """A key of gpu-0 that is bound to its own certificate, issued beside the server by the command."""
    pair = walled.certificates["its own"]
    assert pair is not None
    command = [str(Path(sys.executable).with_name("kvcustody")), "apikey", "issue", "gpu-0", "--json"]
    command += ["--certificate", str(pair.certificate)]
    made = subprocess.run(command, env=walled.plane.environment(), stdout=subprocess.PIPE, check=True)
    return str(json.loads(made.stdout)["key"])


def test_a_bound_key_is_nobodys_over_another_certificate(walled: Walled, bound: str) -> None:
    assert register(connect(walled, "its own", key=bound))
    for _ in range(2):  # looked up a moment ago, and after it was refused
        with pytest.raises(ServiceError, match="No valid credential"):
            register(connect(walled, "another of ours", key=bound))
        assert register(connect(walled, "its own", key=bound))
    assert register(connect(walled, "another of ours"))  # control: a key that is bound to none
    thief = connect(walled, "another of ours", key=bound)
    own = walled.certificates["its own"]
    assert own is not None
    said = {
        "X-Client-Cert": own.certificate.read_text().strip().replace("\n", " "),
        "X5t-S256": thumbprint_in(own.certificate),
    }
    thief._client.headers.update(said | {"Kvcustody.Certificate": thumbprint_in(own.certificate)})
    with pytest.raises(ServiceError, match="No valid credential"):
        register(thief)


def test_a_bound_key_is_nobodys_without_a_certificate(walled: Walled, bound: str) -> None:
    """On the address of people no certificate is asked for, and one that is sent is not looked at."""
    own = walled.certificates["its own"]
    assert own is not None
    context = ssl.create_default_context(cafile=str(walled.ours.pem))
    context.load_cert_chain(own.certificate, own.key)
    transport = httpx.HTTPTransport(uds=f"{walled.plane.folder}/api.sock", verify=context)
    with httpx.Client(transport=transport, base_url="https://127.0.0.1") as client:
        for key, status in ((bound, 401), (walled.plane.keys["gpu-0"], 200)):  # the second is the control
            answer = client.get("/v1/whoami", headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == status


def test_what_replaces_a_bound_key_is_bound_and_only_workers_have_one(walled: Walled, bound: str) -> None:
    assert walled.plane._service is not None
    book = walled.plane._service.principals
    before = {key.prefix: key.certificate for key in book.keys("gpu-0")}
    assert before[bound.split("_")[1]] is not None and None in before.values()
    replaced = book.issue_key("gpu-0", days=1, overlap_days=1, by="test")
    [made] = [key for key in book.keys("gpu-0") if key.prefix == replaced.prefix]
    assert made.certificate == before[bound.split("_")[1]]
    with pytest.raises(ProblemError, match="a worker alone"):
        book.issue_key("olive", days=1, certificate=made.certificate, by="test")


def test_a_bound_key_replaces_itself_by_one_that_is_bound_alike(walled: Walled, bound: str) -> None:
    own = walled.certificates["its own"]
    assert own is not None
    with connect(walled, "its own", key=bound) as worker:
        made = worker.post("/v1/keys:rotate", {"days": 1, "overlap_days": 1})["key"]
        listed = {key["prefix"]: key["certificate"] for key in worker.get("/v1/keys")["items"]}
    assert listed[made.split("_")[1]] == thumbprint_in(own.certificate)
    assert register(connect(walled, "its own", key=made))
    with pytest.raises(ServiceError, match="No valid credential"):
        register(connect(walled, "another of ours", key=made))


def test_a_key_is_bound_to_the_certificate_of_its_connection_where_that_is_asked(walled: Walled) -> None:
    """gpu-1 has no bound key: what replaces its key is bound only with `--bind`."""
    own, key_file = walled.certificates["another of ours"], walled.plane.key_file("gpu-1")
    assert own is not None
    with connect(walled, "another of ours", key=walled.plane.keys["gpu-1"]) as worker:
        free = worker.post("/v1/keys:rotate", {"days": 1, "overlap_days": 1})["key"]
    assert register(connect(walled, "its own", key=free)), "control: bound to none, as the key before"
    asked = [str(Path(sys.executable).with_name("kvcustody")), "apikey", "rotate", "--server", walled.workers]
    asked += ["--ca", str(walled.ours.pem), "--api-key-file", str(key_file), "--bind", "--json"]
    asked += ["--client-certificate", str(own.certificate), "--client-key", str(own.key)]
    made = json.loads(subprocess.run(asked, stdout=subprocess.PIPE, check=True).stdout)["key"]
    assert register(connect(walled, "another of ours", key=made))
    with pytest.raises(ServiceError, match="No valid credential"):
        register(connect(walled, "its own", key=made))


def test_people_are_not_served_at_the_workers_address(walled: Walled) -> None:
    for path in ("/v1/keys", "/v1/workers"):
        operator = connect(walled, "its own", key=walled.plane.keys["olive"])
        with operator, pytest.raises(ServiceError, match="Nothing here"):
            operator.get(path)


def test_a_worker_believes_no_other_servers_certificate(walled: Walled) -> None:
    with pytest.raises(ServiceError) as refused:
        register(connect(walled, "its own", authority=walled.ours.pem.with_name("others.pem")))
    assert refused.value.operands["problem"] == "tls"


def test_a_worker_opens_by_its_settings_alone(walled: Walled, tmp_path: Path) -> None:
    plane, pair = walled.plane, walled.certificates["its own"]
    assert pair is not None
    tls = {"control_plane_ca_path": walled.ours.pem}
    own = {"control_plane_certificate_path": pair.certificate, "control_plane_certificate_key_path": pair.key}
    with pytest.raises(CustodyError, match=r"no TLS connection|cannot be reached"):
        opened(plane.settings(**tls))
    with pytest.raises(ConfigError, match="TLS files cannot be used"):
        opened(plane.settings(**tls, **(own | {"control_plane_certificate_path": tmp_path / "absent"})))
    with pytest.raises(CustodyError, match="nothing is in effect"):  # control: it is asked, and answers
        opened(plane.settings(**tls, **own))


def test_renewed_tls_files_are_served_without_a_restart(tmp_path: Path) -> None:
    """Control: files that do not belong together change nothing."""
    ours = Authority(tmp_path, "ours")
    first, later = ours.issue("first", server=True), ours.issue("later", server=True)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    plane = ControlPlane(
        tmp_path,
        workers_listen=f"127.0.0.1:{port}",
        tls_certificate_path=str(first.certificate),
        tls_key_path=str(first.key),
        tls_client_ca_path=str(ours.pem),
    )

    def shown() -> int:
        context = ssl.create_default_context(cafile=str(ours.pem))
        plain = socket.create_connection(("127.0.0.1", port), timeout=20)
        with context.wrap_socket(plain, server_hostname="127.0.0.1") as sock:
            found = sock.getpeercert(binary_form=True)
        assert found is not None
        return x509.load_der_x509_certificate(found).serial_number

    def serial(pair: Path) -> int:
        return x509.load_pem_x509_certificate(pair.read_bytes()).serial_number

    try:
        wanted = serial(later.certificate)
        assert shown() == serial(first.certificate) != wanted
        later.certificate.rename(first.certificate)
        time.sleep(0.5)
        assert shown() != wanted, "the key is not there yet"
        later.key.rename(first.key)
        deadline = time.monotonic() + 30
        while shown() != wanted:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        plane.end()
