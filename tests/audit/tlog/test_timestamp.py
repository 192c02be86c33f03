"""RFC 3161 against a real authority: OpenSSL's, with a root made for the test."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select
from typer.testing import CliRunner

from kvcustody.audit.exports.export_writer import write_export
from kvcustody.audit.exports.ledger_source import LedgerSource
from kvcustody.audit.kinds import KeyEvent
from kvcustody.audit.store.schema.retention import timestamps
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.audit.tlog.witness.rfc3161_timestamp import (
    TimestampAuthority,
    TimestampError,
    ask,
    check,
    stamp,
)
from kvcustody.clock import SystemClock
from kvcustody.console.main import app
from standins.audit.verifiers import verify_both

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="the authority is OpenSSL's")

CONFIG = """
[tsa]
serial = {folder}/serial
signer_digest = sha256
default_policy = 1.2.3.4.1
digests = sha256, sha512
accuracy = secs:1
ess_cert_id_alg = sha256
"""


def openssl(*words: str, cwd: Path) -> None:
    subprocess.run(["openssl", *words], cwd=cwd, check=True, capture_output=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root, an authority under it, and a stranger's root."""
    folder_path = tmp_path_factory.mktemp("tsa")
    (folder_path / "tsa.cnf").write_text(CONFIG.format(folder=folder_path))
    (folder_path / "serial").write_text("01\n")
    (folder_path / "ext").write_text("extendedKeyUsage=critical,timeStamping\nkeyUsage=critical,digitalSignature\n")
    for name in ("root", "stranger"):
        openssl(
            "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{name}.key", "-out", f"{name}.pem",
            "-days", "30", "-subj", f"/CN={name}", cwd=folder_path,
        )  # fmt: skip
    openssl(
        "req",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        "tsa.key",
        "-out",
        "tsa.csr",
        "-subj",
        "/CN=tsa",
        cwd=folder_path,
    )
    openssl(
        "x509", "-req", "-in", "tsa.csr", "-CA", "root.pem", "-CAkey", "root.key", "-CAcreateserial",
        "-out", "tsa.pem", "-days", "30", "-extfile", "ext", cwd=folder_path,
    )  # fmt: skip
    return folder_path


class Server(HTTPServer):
    """Answers timestamp queries with OpenSSL's authority."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Reply)
        self.folder = folder
        self.replay: bytes | None = None
        self.asked = 0


class _Reply(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        folder = self.server.folder
        self.server.asked += 1
        (folder / "query").write_bytes(self.rfile.read(int(self.headers["Content-Length"])))
        openssl(
            "ts", "-reply", "-config", "tsa.cnf", "-section", "tsa", "-queryfile", "query", "-signer", "tsa.pem",
            "-inkey", "tsa.key", "-out", "reply", cwd=folder,
        )  # fmt: skip
        data = self.server.replay or (folder / "reply").read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    made = Server(folder)
    threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture
def authority(server: Server, folder: Path) -> TimestampAuthority:
    url = f"http://127.0.0.1:{server.server_port}/"
    return TimestampAuthority.load("tsa", url, folder / "tsa.pem", folder / "root.pem")


def test_a_token_is_of_this_message_authority_and_question(
    authority: TimestampAuthority, folder: Path, server: Server
) -> None:
    token, at_us = ask(authority, b"checkpoint", timeout_seconds=10)
    assert abs(at_us - SystemClock().utc_us()) < 60_000_000
    assert check(authority, token, b"checkpoint") == at_us
    with pytest.raises(TimestampError):
        check(authority, token, b"another")
    stranger = TimestampAuthority.load("tsa", authority.url, folder / "tsa.pem", folder / "stranger.pem")
    with pytest.raises(TimestampError):
        check(stranger, token, b"checkpoint")
    server.replay = token  # an old answer to a new question: its nonce is another
    with pytest.raises(TimestampError):
        ask(authority, b"checkpoint", timeout_seconds=10)


def test_no_byte_of_a_token_can_be_changed(authority: TimestampAuthority) -> None:
    token, at_us = ask(authority, b"checkpoint", timeout_seconds=10)
    for at in range(0, len(token), 17):
        changed = token[:at] + bytes([token[at] ^ 1]) + token[at + 1 :]
        try:
            assert check(authority, changed, b"checkpoint") == at_us  # outside what is signed
        except TimestampError:
            continue


def test_the_newest_checkpoint_is_stamped_once(
    store: Engine, make_writer: Any, authority: TimestampAuthority, server: Server, tmp_path: Path
) -> None:
    writer = make_writer(store)
    writer.submit_durable(KeyEvent(1, "acme", "made", 1, "operator"))
    signer = CheckpointSigner(
        store, [SigningKey.generate("ledger.example")], memory=tmp_path / "last", clock=SystemClock()
    )
    signer.sign_once()
    first = stamp(store, authority)
    assert stamp(store, authority) == first and server.asked == 1
    with store.connect() as connection:
        rows = connection.execute(select(timestamps)).all()
    assert [(row.size, row.authority, row.at_us) for row in rows] == [(first[0], "tsa", first[1])]


def test_an_authority_that_is_away(authority: TimestampAuthority, server: Server, folder: Path) -> None:
    gone = TimestampAuthority("tsa", "http://127.0.0.1:1/", authority.certificate, authority.roots)
    with pytest.raises(TimestampError):
        ask(gone, b"checkpoint", timeout_seconds=1)
    server.replay = b"nonsense"
    with pytest.raises(TimestampError):
        ask(authority, b"checkpoint", timeout_seconds=5)
    with pytest.raises(TimestampError):
        TimestampAuthority.load("tsa", "http://x/", folder / "absent.pem", folder / "root.pem")


def test_an_export_says_when_its_checkpoint_existed(
    store: Engine, make_writer: Any, authority: TimestampAuthority, folder: Path, tmp_path: Path
) -> None:
    """Offline, by the reader's own certificates; also over an earlier checkpoint, and by OpenSSL alone."""
    writer, key = make_writer(store), SigningKey.generate("ledger.example")
    signer = CheckpointSigner(store, [key], memory=tmp_path / "last", clock=SystemClock())
    sizes = []
    for number in range(2):  # the second checkpoint is not stamped, and extends the one that is
        writer.submit_durable(KeyEvent(1, "acme", "made", number, "operator"))
        signed = signer.sign_once()
        assert signed is not None
        sizes.append(signed.size)
        if not number:
            stamp(store, authority)
    place = tmp_path / "export"
    write_export(place, LedgerSource(store), made_at_us=1)
    (name,) = json.loads((place / "manifest.json").read_bytes())["timestamps"]
    vkey = str(key.verifier)
    found = verify_both(place, [vkey], authorities=[authority])
    assert found.ok and [(seen.authority, seen.size) for seen in found.stamps] == [("tsa", sizes[0])]
    assert not any("when" in limit for limit in found.limits) and found.root.size == sizes[1]
    # Nobody's certificate: sound, and said so. A stranger's: not sound.
    assert "when this existed: 1 timestamps came along, and none was checked" in verify_both(place, [vkey]).limits
    stranger = TimestampAuthority.load("stranger", "", folder / "tsa.pem", folder / "stranger.pem")
    assert "no timestamp" in verify_both(place, [vkey], authorities=[stranger]).problems[0]
    text, token = (str(place / name["place"]) + ending for ending in (".txt", ".tsr"))
    openssl(
        "ts",
        "-verify",
        "-data",
        text,
        "-in",
        token,
        "-CAfile",
        "root.pem",
        "-untrusted",
        "tsa.pem",
        cwd=folder,
    )
    command = CliRunner().invoke(
        app,
        shlex.split(
            f"audit verify {place} --key {vkey} --json"
            f" --tsa-certificate {folder / 'tsa.pem'} --tsa-roots {folder / 'root.pem'}"
        ),
    )
    assert command.exit_code == 0 and json.loads(command.stdout)["timestamps"][0]["size"] == sizes[0]
    # A genuine token over the text of a checkpoint that this ledger never had.
    other = Path(text).read_text().replace(f"\n{sizes[0]}\n", f"\n{sizes[1]}\n")
    Path(text).write_text(other)
    Path(token).write_bytes(ask(authority, other.encode(), timeout_seconds=10)[0])
    assert not verify_both(place, [vkey], authorities=[authority]).ok
    assert not verify_both(place, vkey).ok
