"""What is handed over, and to whom: folders, a real S3 server, webhooks; and what becomes of what is not taken."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from kvcustody.audit.siem.sink import SinkError, check_webhook
from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.store.schema.service import service_report_deliveries
from kvcustody.errors import ConfigError
from kvcustody.files import publish_folder
from kvcustody.governance.service.schedules import folder_delivery, report_scheduler, webhook_delivery
from kvcustody.governance.service.schedules.folder_delivery import FolderDelivery
from kvcustody.governance.service.schedules.parcel import Parcel
from kvcustody.governance.service.schedules.s3_delivery import S3Delivery
from kvcustody.governance.service.schedules.webhook_delivery import WebhookDelivery
from kvcustody.governance.service.service import Service
from kvcustody.governance.service.settings import ReportFolder, ReportStore, ReportWebhook
from kvcustody.governance.tiers.stores.s3_requests import S3Key, signed_headers
from standins.service.schedules_world import KEY, LATER, made, move_back, on_record, reports, settled
from standins.service.service_world import Worker, register, ship
from standins.sinks import WebhookReceiver

pytestmark = pytest.mark.system

PARCEL = Parcel(
    "ab" * 16,
    "soc2-2026-01-01-2026-02-01-abab",
    {"digest": "d"},
    {"report.json": b"{}", "report.pdf": b"%PDF"},
)
MOTO = Path(__file__).resolve().parents[3] / ".venv-s3" / "bin" / "python"
EXAMPLE = S3Key("AKIAIOSFODNN7EXAMPLE", b"wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "us-east-1")


# -- a folder -----------------------------------------------------------------------------------------------------


@pytest.fixture
def share(tmp_path: Path) -> Path:
    path = tmp_path / "share"
    path.mkdir(mode=0o700)
    return path


def test_a_folder_is_there_whole_and_a_second_time_the_same(share: Path) -> None:
    to = FolderDelivery("share", share)
    assert to.deliver(PARCEL) == PARCEL.name
    first = {path.name: path.stat().st_ino for path in (share / PARCEL.name).iterdir()}
    assert to.deliver(PARCEL) == PARCEL.name
    assert {path.name: path.stat().st_ino for path in (share / PARCEL.name).iterdir()} == first
    assert {path.name: path.read_bytes() for path in (share / PARCEL.name).iterdir()} == PARCEL.files
    assert all(path.stat().st_mode & 0o077 == 0 for path in (share / PARCEL.name).iterdir())


def test_a_folder_that_is_cut_short_leaves_nothing(share: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(draft: Path, folder: Path) -> None:
        raise OSError(28, "No space left on device")

    to = FolderDelivery("share", share)
    monkeypatch.setattr(folder_delivery, "publish_folder", full)
    with pytest.raises(SinkError, match="No space left"):
        to.deliver(PARCEL)
    assert list(share.iterdir()) == []
    monkeypatch.setattr(folder_delivery, "publish_folder", publish_folder)
    (share / f".{PARCEL.name}.killed.new").mkdir()  # what a killed process left
    to.deliver(PARCEL)
    assert [path.name for path in share.iterdir()] == [PARCEL.name]


@pytest.mark.parametrize("what", ["file", "link", "other", "more", "linked file"])
def test_what_is_not_ours_in_a_folder_is_left_as_it_is(share: Path, tmp_path: Path, what: str) -> None:
    to, target, away = FolderDelivery("share", share), share / PARCEL.name, tmp_path / "away"
    away.mkdir()
    if what == "file":
        target.write_text("mine")
    elif what == "link":
        target.symlink_to(away)
    else:
        to.deliver(PARCEL)
        if what == "other":
            (target / "report.json").write_bytes(b"[]")
        elif what == "more":
            (target / "note.txt").write_text("mine")
        else:
            (target / "report.json").unlink()
            (away / "report.json").write_bytes(PARCEL.files["report.json"])
            (target / "report.json").symlink_to(away / "report.json")
    with pytest.raises(SinkError, match="is there"):
        to.deliver(PARCEL)
    assert what != "link" or list(away.iterdir()) == []


def test_a_folder_that_others_write_in_is_refused(share: Path, tmp_path: Path) -> None:
    to = FolderDelivery("share", share)
    share.chmod(0o770)
    with pytest.raises(SinkError, match="others may write"):
        to.deliver(PARCEL)
    with pytest.raises(SinkError, match="others may write"):
        FolderDelivery("share", share)
    share.chmod(0o755)
    to.deliver(PARCEL)
    (tmp_path / "link").symlink_to(share)
    with pytest.raises(SinkError, match="no folder"):
        FolderDelivery("share", tmp_path / "link")
    with pytest.raises(SinkError, match="No such file"):
        FolderDelivery("share", tmp_path / "none")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder to another user")
def test_a_folder_of_another_user_is_refused(share: Path) -> None:
    os.chown(share, 12345, 12345)
    with pytest.raises(SinkError, match="another user's"):
        FolderDelivery("share", share)


# -- a store that speaks S3 -----------------------------------------------------------------------------------------


def test_signatures_are_those_of_the_published_examples() -> None:
    """AWS, "Signature Calculations for the Authorization Header": GET Object and PUT Object."""
    now = datetime(2013, 5, 24, tzinfo=UTC)
    host = "examplebucket.s3.amazonaws.com"
    got = signed_headers("GET", host, "/test.txt", {"range": "bytes=0-9"}, b"", EXAMPLE, now)
    assert got["authorization"].endswith("f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41")
    headers = {"date": "Fri, 24 May 2013 00:00:00 GMT", "x-amz-storage-class": "REDUCED_REDUNDANCY"}
    body = b"Welcome to Amazon S3."
    put = signed_headers("PUT", host, "/test$file.text", headers, body, EXAMPLE, now)
    assert put["authorization"].endswith("98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd")
    assert "EXAMPLEKEY" not in repr(EXAMPLE)


class MotoStore:
    """`moto_store.py`, in `.venv-s3` (`make test-s3` makes it)."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("moto_store.py")
        self._process = subprocess.Popen(
            [MOTO, script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.address, name, secret = self._line()
        self.key = S3Key(name, secret.encode(), "us-east-1")

    def _line(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def _ask(self, line: str) -> dict[str, bytes]:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return {key: text.encode("latin-1") for key, text in self._line().items()}

    def objects(self) -> dict[str, bytes]:
        return self._ask("objects")

    def put(self, key: str, data: bytes) -> None:
        self._ask(f"put {key} {data.decode()}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


class _Objects(BaseHTTPRequestHandler):
    """PUT and GET of objects, with signatures checked from the request as it came (no code of ours)."""

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server: Any = self.server
        if not self._signed(body):
            self._answer(403, b"<Error><Code>SignatureDoesNotMatch</Code></Error>")
        elif self.path in server.objects and self.headers.get("If-None-Match") == "*":
            self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        else:
            server.objects[self.path] = body
            self._answer(200, b"")

    def do_GET(self) -> None:
        server: Any = self.server
        if not self._signed(b""):
            self._answer(403, b"<Error><Code>SignatureDoesNotMatch</Code></Error>")
        else:
            self._answer(200 if self.path in server.objects else 404, server.objects.get(self.path, b""))

    def _signed(self, body: bytes) -> bool:
        matched = re.fullmatch(
            r"AWS4-HMAC-SHA256 Credential=(\S+?)/(\d{8})/([a-z0-9-]+)/s3/aws4_request, ?"
            r"SignedHeaders=(\S+?), ?Signature=([0-9a-f]{64})",
            self.headers["Authorization"],
        )
        server: Any = self.server
        if matched is None or matched[1] != server.key.id:
            return False
        names, date = matched[4].split(";"), matched[2]
        content = hashlib.sha256(body).hexdigest()
        if "host" not in names or self.headers["x-amz-content-sha256"] != content or names != sorted(names):
            return False
        said = "\n".join(f"{name}:{self.headers[name]}" for name in names)
        canonical = f"{self.command}\n{self.path}\n\n{said}\n\n{matched[4]}\n{content}"
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        scope = f"{date}/{matched[3]}/s3/aws4_request"
        text = f"AWS4-HMAC-SHA256\n{self.headers['x-amz-date']}\n{scope}\n{digest}"
        key = b"AWS4" + server.key.secret
        for part in (date, matched[3], "s3", "aws4_request"):
            key = hmac.new(key, part.encode(), "sha256").digest()
        return hmac.new(key, text.encode(), "sha256").hexdigest() == matched[5]

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


class SmallStore:
    """Objects in memory behind `_Objects`."""

    def __init__(self) -> None:
        self._server: Any = HTTPServer(("127.0.0.1", 0), _Objects)
        self._server.objects, self.key = {}, EXAMPLE
        self._server.key = self.key
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def objects(self) -> dict[str, bytes]:
        return {path.removeprefix("/reports/"): data for path, data in self._server.objects.items()}

    def put(self, key: str, data: bytes) -> None:
        self._server.objects[f"/reports/{key}"] = data

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture(scope="module", params=["small", "moto"])
def store(request: pytest.FixtureRequest) -> Iterator[SmallStore | MotoStore]:
    if request.param == "moto" and not MOTO.exists():
        pytest.skip("there is no .venv-s3: `make test-s3` makes it")
    opened = SmallStore() if request.param == "small" else MotoStore()
    yield opened
    opened.close()


def test_a_real_store_takes_what_is_signed(store: SmallStore | MotoStore) -> None:
    to = S3Delivery("s3", store.address, "reports", "audits/2026", store.key)
    assert to.deliver(PARCEL) == f"s3://reports/audits/2026/{PARCEL.name}/"
    place = f"audits/2026/{PARCEL.name}"
    assert store.objects() == {f"{place}/{name}": data for name, data in PARCEL.files.items()}
    to.deliver(PARCEL)  # again changes nothing
    store.put(f"{place}/report.json", b"somebody-else")
    with pytest.raises(SinkError, match="exists with other content"):
        to.deliver(PARCEL)
    assert store.objects()[f"{place}/report.json"] == b"somebody-else"


def test_a_real_store_refuses_another_secret(store: SmallStore | MotoStore) -> None:
    """Positive control of the one above: this server checks signatures."""
    wrong = store.key._replace(secret=b"x" * 40)
    with pytest.raises(SinkError, match="403 SignatureDoesNotMatch") as refused:
        S3Delivery("s3", store.address, "reports", "wrong", wrong).deliver(PARCEL)
    assert "x" * 40 not in str(refused.value)
    assert not any(key.startswith("wrong") for key in store.objects())


@pytest.mark.parametrize(
    "endpoint",
    ["http://s3.example.com", "ftp://s3.example.com", "s3.example.com", "https://a:b@s3.example.com",
     "https://s3.example.com/path", "https://s3.example.com?x=1", "http://169.254.169.254"],
)  # fmt: skip
def test_an_endpoint_is_https_or_on_this_machine(endpoint: str) -> None:
    with pytest.raises(SinkError):
        S3Delivery("s3", endpoint, "reports", "", EXAMPLE)


# -- a webhook ------------------------------------------------------------------------------------------------------


@pytest.fixture
def hook() -> Iterator[WebhookReceiver]:
    with WebhookReceiver() as opened:
        yield opened


def test_a_webhook_gets_the_files_signed(hook: WebhookReceiver) -> None:
    WebhookDelivery("hook", hook.address + "/in", KEY).deliver(PARCEL)
    [(headers, body)] = hook.batches
    said = (headers["webhook-id"], headers["webhook-timestamp"], headers["webhook-signature"])
    check_webhook(KEY, *said, body, now_seconds=int(time.time()))
    with pytest.raises(SinkError):
        check_webhook(b"another key of 24 bytes.", *said, body, now_seconds=int(time.time()))
    document = json.loads(body)
    assert document["schema"] == "kvcustody/report-delivery@1" and document["digest"] == "d"
    for each in document["files"]:
        data = base64.b64decode(each["content"])
        assert data == PARCEL.files[each["name"]] and hashlib.sha256(data).hexdigest() == each["sha256"]


@pytest.mark.parametrize("kind", ["webhook", "s3"])
def test_a_redirect_leads_nowhere(hook: WebhookReceiver, kind: str) -> None:
    """A receiver cannot send the service on to another address."""
    hook.status = 302
    to: Any = WebhookDelivery("hook", hook.address, KEY)
    if kind == "s3":
        to = S3Delivery("s3", hook.address, "reports", "", EXAMPLE)
    with pytest.raises(SinkError, match="302"):
        to.deliver(PARCEL)
    assert len(hook.batches) == 1


def test_a_report_that_is_too_large_is_not_sent_in_part(hook: WebhookReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook_delivery, "_BODY_BYTES_MAX", 100)
    with pytest.raises(SinkError, match="too large"):
        WebhookDelivery("hook", hook.address, KEY).deliver(PARCEL)
    assert hook.batches == []


# -- a service ------------------------------------------------------------------------------------------------------


def opened(make_service: Callable[..., Service], make_client: Any, make_people: Any, *to: Any) -> Any:
    service = make_service(**LATER, report_destinations=to)
    client, people = make_client(service), make_people(service)
    worker = Worker()
    register(client, people["worker"], worker)
    ship(client, people["worker"], worker, worker.batch([worker.started(), *worker.request("acme")]))
    return service, client, people


def due_now(service: Service) -> None:
    with service.engine.connect().execution_options(**WRITE) as connection, connection.begin():
        connection.execute(
            update(service_report_deliveries).where(service_report_deliveries.c.state == "waiting").values(next_us=0)
        )


def secret_file(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    path.chmod(0o600)
    return path


def test_a_schedule_hands_over_to_all_kinds(
    make_service: Any,
    make_client: Any,
    make_people: Any,
    tmp_path: Path,
    share: Path,
    hook: WebhookReceiver,
    store: SmallStore | MotoStore,
) -> None:
    hook_key = secret_file(tmp_path, "hook.key", KEY)
    s3_key = secret_file(tmp_path, "s3.key", store.key.secret)
    service, client, people = opened(
        make_service, make_client, make_people,
        ReportFolder(kind="folder", name="share", path=share),
        ReportWebhook(kind="webhook", name="hook", url=f"{hook.address}/secret-token", key_path=hook_key),
        ReportStore(
            kind="s3", name="bucket", endpoint=store.address, bucket="reports", prefix="whole",
            access_key_id=store.key.id, secret_path=s3_key,
        ),
    )  # fmt: skip
    schedule = made(client, people["auditor"], destinations=["share", "hook", "bucket"])
    move_back(service, schedule["schedule"], 31)
    [report] = settled(service, client, people["auditor"], schedule["schedule"])
    assert {each["destination"]: each["state"] for each in report["deliveries"]} == {
        "share": "delivered", "hook": "delivered", "bucket": "delivered"
    }  # fmt: skip
    in_folder = (next(share.iterdir()) / "report.json").read_bytes()
    in_store = {key: data for key, data in store.objects().items() if key.startswith("whole/")}
    posted = json.loads(hook.batches[0][1])
    assert list(in_store.values()) == [in_folder] == [base64.b64decode(posted["files"][0]["content"])]
    assert posted["opinion"] == report["opinion"] and posted["digest"] == report["digest"]
    everything = b"".join(
        [json.dumps(on_record(service, kind)).encode()
         for kind in ("report-schedule-changed", "scheduled-report-made", "report-delivery")]
    )  # fmt: skip
    for path in ("/v1/reports", "/v1/reports/schedules", "/v1/reports/destinations", "/v1/inbox"):
        everything += client("GET", path, people["auditor"]).content
    everything += Path(tmp_path / "ledger.db").read_bytes()
    for secret in (KEY, store.key.secret, b"secret-token", store.address.encode()):
        assert secret not in everything
    assert b"delivered" in everything  # what is searched is there


def test_what_is_not_taken_is_tried_again_and_never_lost(
    make_service: Any,
    make_client: Any,
    make_people: Any,
    tmp_path: Path,
    hook: WebhookReceiver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(report_scheduler, "_TRIES_MAX", 3)
    hook.status = 503
    key = secret_file(tmp_path, "hook.key", KEY)
    to = ReportWebhook(kind="webhook", name="hook", url=hook.address, key_path=key)
    service, client, people = opened(make_service, make_client, make_people, to)
    schedule = made(client, people["auditor"], destinations=["hook"])
    move_back(service, schedule["schedule"], 31)
    settled(service, client, people["auditor"], schedule["schedule"])

    def delivery() -> dict[str, Any]:
        return dict(reports(client, people["auditor"])[0]["deliveries"][0])

    def waits() -> list[tuple[str, str]]:
        items = client("GET", "/v1/inbox", people["auditor"]).json()["items"]
        return [(item["state"], item["text"]) for item in items if item["kind"] == "report"]

    first = delivery()
    assert (first["state"], first["tries"]) == ("waiting", 1) and "503" in first["error"]
    assert [state for state, _ in waits()] == ["waiting"] and "after 1 tries" in waits()[0][1]
    service.scheduler.turn()
    assert delivery() == first  # not before its time
    due_now(service)
    service.scheduler.turn()
    second = delivery()
    now_us = service.clock.utc_us()
    assert second["tries"] == 2 and 55e6 < second["next_us"] - now_us <= 60e6  # twice the 30 s of the first
    due_now(service)
    service.scheduler.turn()
    assert (delivery()["state"], [state for state, _ in waits()]) == ("given-up", ["overdue"])
    text = client("GET", "/metrics", people["operator"]).text
    assert 'kvcustody_report_deliveries{state="given-up"} 1.0' in text
    assert "kvcustody_report_undelivered 1.0" in text
    assert 'kvcustody_inbox_items{kind="report",state="overdue"} 1.0' in text
    due_now(service)
    service.scheduler.turn()
    assert len(hook.batches) == 3  # given up
    hook.status = 204
    report = reports(client, people["auditor"])[0]["report"]
    assert client("POST", f"/v1/reports/{report}/retry", people["tenant-admin@acme"]).status_code == 404
    assert client("POST", f"/v1/reports/{report}/retry", people["auditor"]).status_code == 200
    service.scheduler.turn()
    assert delivery()["state"] == "delivered" and waits() == []
    assert client("POST", f"/v1/reports/{report}/retry", people["auditor"]).status_code == 409
    assert [(each["action"], each["actor"]) for each in on_record(service, "report-delivery")] == [
        ("begun", service.settings.name), ("failed", service.settings.name), ("given-up", service.settings.name),
        ("again", "auditor"), ("begun", service.settings.name), ("delivered", service.settings.name),
    ]  # fmt: skip


def test_one_destination_that_fails_holds_up_no_other(
    make_service: Any, make_client: Any, make_people: Any, tmp_path: Path, share: Path, hook: WebhookReceiver
) -> None:
    hook.status = 500
    key = secret_file(tmp_path, "hook.key", KEY)
    service, client, people = opened(
        make_service,
        make_client,
        make_people,
        ReportWebhook(kind="webhook", name="a-hook", url=hook.address, key_path=key),
        ReportFolder(kind="folder", name="share", path=share),
    )
    schedule = made(client, people["auditor"], destinations=["a-hook", "share"])
    move_back(service, schedule["schedule"], 31)
    [report] = settled(service, client, people["auditor"], schedule["schedule"])
    assert [each["state"] for each in report["deliveries"]] == ["waiting", "delivered"]
    deleted = f"/v1/reports/schedules/{schedule['schedule']}/delete"
    assert client("POST", deleted, people["auditor"], json={}).status_code == 200
    [report] = reports(client, people["auditor"])
    assert [each["state"] for each in report["deliveries"]] == ["given-up", "delivered"]
    assert [i for i in client("GET", "/v1/inbox", people["auditor"]).json()["items"] if i["kind"] == "report"] == []


def test_files_that_were_changed_on_disk_are_not_handed_over(
    make_service: Any, make_client: Any, make_people: Any, tmp_path: Path, share: Path
) -> None:
    service, client, people = opened(
        make_service, make_client, make_people, ReportFolder(kind="folder", name="share", path=share)
    )
    share.chmod(0o777)  # refused for now
    schedule = made(client, people["auditor"], destinations=["share"])
    move_back(service, schedule["schedule"], 31)
    [report] = settled(service, client, people["auditor"], schedule["schedule"])
    path = tmp_path / "state" / "jobs" / report["job"] / "report.json"
    path.write_bytes(path.read_bytes().replace(b'"opinion"', b'"0pinion"'))
    share.chmod(0o700)
    deadline = time.monotonic() + 60
    while reports(client, people["auditor"])[0]["deliveries"][0]["state"] != "delivered":
        assert time.monotonic() < deadline
        due_now(service)
        service.scheduler.turn()
    [folder] = share.iterdir()
    assert b'"0pinion"' not in (folder / "report.json").read_bytes()
    assert reports(client, people["auditor"])[0]["digest"] == report["digest"]  # made again, the same


@pytest.mark.parametrize("mode", [0o644, 0o640])
def test_a_key_that_others_read_ends_the_start(make_service: Any, tmp_path: Path, mode: int) -> None:
    key = secret_file(tmp_path, "hook.key", KEY)
    key.chmod(mode)
    to = ReportWebhook(kind="webhook", name="hook", url="https://example.com/", key_path=key)
    with pytest.raises(ConfigError, match="open to others"):
        make_service(**LATER, report_destinations=(to,))
