"""What waits for somebody: who is shown what, one word for it everywhere, and that it is delivered once."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email import message_from_string
from email.policy import default
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from typer.testing import CliRunner

from kvcustody.audit.kinds import ErasureCompleted
from kvcustody.audit.siem.sink import check_webhook
from kvcustody.console.main import app
from kvcustody.errors import ConfigError
from kvcustody.governance.release.release_desk import ReleaseWorkflow
from kvcustody.governance.release.signer import open_signer
from kvcustody.governance.release.store import SqlStore
from kvcustody.governance.service.inbox.delivery import InboxDelivery
from kvcustody.governance.service.inbox.item import InboxItem, InboxKind, InboxState
from kvcustody.governance.service.inbox.read_inbox import InboxReader
from kvcustody.governance.service.settings import InboxMail, InboxWebhook, ServiceSettings
from standins.console.receivers import mail_server, serving
from standins.console.web_world import World, policy_source, running
from standins.sinks import WebhookReceiver


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, migrated: Path) -> Iterator[World]:
    """A policy in effect whose grant ends soon, a proposal, and an erasure that no worker answers."""
    folder = tmp_path_factory.mktemp("inbox")
    shutil.copy(migrated, folder / "ledger.db")
    with running(folder) as opened:
        opened.release()
        desk = ReleaseWorkflow(
            SqlStore(opened.service.engine),
            opened.service.policies.trust,
            clock=opened.service.clock,
            ledger=opened.service.writer,
        )
        near = (datetime.now(UTC) + timedelta(days=9)).date().isoformat()
        text = policy_source().replace("until: 2027-03-31", f"until: {near}")
        assert near in text
        author, approver = (open_signer(Path(opened.signing_key(name))) for name in ("author", "approver"))
        desk.propose(text, author, note="sooner")
        desk.approve(2, approver, cells=desk.review(2).cells)
        desk.activate(2, approver)
        opened.worker.activate(2, text)
        grant = "  - id: more-of-acme\n    owner: acme\n    reader: globex\n    at_most: internal\n"
        grant += "    crosses: [region]\n    until: 2027-03-31\n    reason: pilot\n\nrules:\n"
        desk.propose(text.replace("rules:\n", grant, 1), author, note="more")
        asked = {"tenant": "acme", "subject": "user-1", "deadline_seconds": 1}
        made = post(opened, "dpo", "/v1/erasures", asked)
        opened.erasure = made["erasure"]  # type: ignore[attr-defined]
        time.sleep(1.2)
        opened.service.cover()
        yield opened


def post(world: World, who: str, path: str, body: dict[str, object]) -> dict[str, str]:
    headers = {"Authorization": f"Bearer {world.keys[who]}", "Idempotency-Key": f"{who}-{path}"}
    answer = httpx.post(world.url + path, json=body, headers=headers)
    assert answer.status_code == 202, answer.text
    return dict(answer.json())


def get(world: World, who: str, path: str) -> httpx.Response:
    answer = httpx.get(world.url + path, headers={"Authorization": f"Bearer {world.keys[who]}"})
    assert answer.status_code == 200, answer.text
    return answer


def kinds(world: World, who: str) -> set[str]:
    """What of it waits for somebody, without their own key, which ends within a day."""
    items = get(world, who, "/v1/inbox").json()["items"]
    return {f"{one['kind']}: {one['state']}" for one in items if one["kind"] != "key"}


def page(world: World, who: str, path: str) -> str:
    with httpx.Client(base_url=world.url, follow_redirects=True) as client:
        client.post("/console/login", data={"key": world.keys[who]})
        answer = client.get(path)
        assert answer.status_code == 200, answer.text
        return answer.text


@pytest.mark.parametrize(
    ("who", "waits"),
    [
        ("approver", {"approval: waiting", "grant: soon"}),
        ("author", {"grant: soon"}),
        ("tenant-admin@acme", {"consent: waiting", "grant: soon", "erasure: overdue"}),
        ("tenant-admin@labs", set()),
        ("tenant-viewer@acme", set()),
        ("dpo", {"erasure: overdue"}),
        ("operator", {"witness: waiting"}),
        ("auditor", set()),
    ],
)
def test_everybody_is_shown_what_they_can_do_something_about(world: World, who: str, waits: set[str]) -> None:
    assert kinds(world, who) == waits
    text = page(world, who, "/console/inbox")
    for kind in waits:
        assert kind.partition(": ")[2] in text
    own = [item for item in get(world, who, "/v1/inbox").json()["items"] if item["kind"] == "key"]
    assert [item["principal"] for item in own] == [who]


def test_a_key_custodian_sees_every_key_that_ends(world: World) -> None:
    assert world.keys["auditor"]
    items = get(world, "key-custodian", "/v1/inbox").json()["items"]
    assert {"auditor", "key-custodian"} <= {item["principal"] for item in items if item["kind"] == "key"}
    post_key = world.service.principals.issue_key("auditor", days=90, by="test")
    items = get(world, "key-custodian", "/v1/inbox").json()["items"]
    assert "auditor" not in {item["principal"] for item in items}, "another key of theirs lasts"
    world.service.principals.revoke_key(post_key.prefix, by="test")


def test_an_empty_inbox_says_what_would_fill_it(world: World) -> None:
    world.keys["auditor"] = world.service.principals.issue_key("auditor", days=90, by="test").key
    text = page(world, "auditor", "/console/inbox")
    assert "Nothing waits for you." in text and "missed their deadline" in text


@pytest.mark.system("a page has another word for a missed erasure")
def test_a_missed_erasure_has_one_word_everywhere(world: World) -> None:
    erasure: str = world.erasure  # type: ignore[attr-defined]
    ledger = ["--ledger", world.database_url]

    def words() -> dict[str, str]:
        run = CliRunner()
        listed = json.loads(run.invoke(app, ["erasure", "list", "--json", *ledger]).stdout)["items"]
        status = json.loads(run.invoke(app, ["erasure", "status", erasure, "--json", *ledger]).stdout)
        metrics = get(world, "operator", "/metrics").text
        counted = re.findall(r'kvcustody_erasures\{state="(\w+)"\} 1(?:\.0)?\n', metrics)
        return {
            "api list": get(world, "dpo", "/v1/erasures").json()["items"][0]["state"],
            "api one": get(world, "dpo", f"/v1/erasures/{erasure}").json()["state"],
            "command list": listed[0]["state"],
            "command one": status["state"],
            "metrics": " ".join(counted),
            "page list": " ".join(re.findall(r'class="badge \w+">(\w+)<', page(world, "dpo", "/console/erasures"))),
            "page one": re.findall(r'class="badge \w+">(\w+)<', page(world, "dpo", f"/console/erasures/{erasure}"))[0],
            "page of the subject": re.findall(
                r'class="badge \w+">(missed|late|open|complete)<',
                page(world, "dpo", "/console/custody/subject?tenant=acme&subject=user-1"),
            )[0],
        }

    def settle(word: str) -> None:  # figures of a scrape come behind
        deadline = time.monotonic() + 20
        while set(words().values()) != {word} and time.monotonic() < deadline:
            time.sleep(0.2)
        assert set(words().values()) == {word}, words()

    world.service.measuring.ledger.fresh_seconds = 0.0
    settle("missed")
    overview = page(world, "dpo", "/console/")
    assert re.search(r'tile bad"><b>.*?1</b>\s*<span><a href="/console/erasures">erasures', overview)
    assert "1 erasure has missed" in page(world, "dpo", "/console/erasures")
    overdue = re.search(
        r"^kvcustody_erasure_overdue_seconds_max (\S+)$",
        get(world, "operator", "/metrics").text,
        re.MULTILINE,
    )
    assert overdue and float(overdue[1]) > 0
    assert "erasure: overdue" in kinds(world, "dpo")
    world.worker.ship([ErasureCompleted(world.worker.now_us, erasure, "acme", "complete", 0, 0, 0)])
    settle("late")
    assert kinds(world, "dpo") == set()


def test_the_command_says_the_same_of_the_ledger_and_of_the_server(world: World, tmp_path: Path) -> None:
    run = CliRunner()
    key = tmp_path / "key"
    key.write_text(world.keys["approver"])
    key.chmod(0o600)
    asked = ["inbox", "--json", "--server", world.url, "--api-key-file", str(key)]
    of_server = {item["id"] for item in json.loads(run.invoke(app, asked).stdout)["items"]}
    config = tmp_path / "service.yaml"
    config.write_text(f"policy_trust: {world.folder / 'trust.toml'}\n")
    found = run.invoke(app, ["inbox", "--json", "--ledger", world.database_url, "--config", str(config)])
    of_ledger = {item["id"] for item in json.loads(found.stdout)["items"]}
    assert of_server and of_server <= of_ledger
    told = run.invoke(app, ["inbox", "--ledger", world.database_url, "--config", str(config)])
    assert "waits for an approval" in told.stdout


def pem(folder: Path, days: int) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kv.example")])
    ends = datetime.now(UTC) + timedelta(days=days)
    built = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    built = built.serial_number(7).not_valid_before(ends - timedelta(days=90)).not_valid_after(ends)
    path = folder / f"{days}.pem"
    path.write_bytes(built.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    return path


@pytest.mark.parametrize(("days", "state"), [(3, ["soon"]), (-1, ["overdue"]), (80, [])])
def test_a_certificate_that_ends(world: World, tmp_path: Path, days: int, state: list[str]) -> None:
    with world.service.reading() as connection:
        found = InboxReader([pem(tmp_path, days)]).read(connection, world.service.clock.utc_us())
    assert [item.state for item in found.items if item.kind is InboxKind.CERTIFICATE] == state
    assert InboxKind.CERTIFICATE in found.ends, "metrics show it, however far away"


# -- delivery -----------------------------------------------------------------------------------------------------


def item(about: str, state: InboxState = InboxState.WAITING) -> InboxItem:
    return InboxItem(
        InboxKind.APPROVAL, about, state, f"revision {about} waits", 1, None, None, None, "/policy/1", "kvcustody x"
    )  # fmt: skip


SECRET, PASSWORD = "whsec-0123456789012345678901234567", "correct horse battery"


def settings(folder: Path, hook: int, mail: int) -> ServiceSettings:
    for name, text in (("hook.key", SECRET), ("mail.key", PASSWORD)):
        if not (folder / name).exists():
            (folder / name).write_text(text)
            (folder / name).chmod(0o600)
    return ServiceSettings(
        inbox_webhook=InboxWebhook(url=f"http://127.0.0.1:{hook}/in", key_path=folder / "hook.key"),
        inbox_mail=InboxMail(
            server=f"127.0.0.1:{mail}", sender="kv@example.org", to=("dpo@example.org",), tls="none",
            user="kv", password_path=folder / "mail.key",
        ),
        inbox_seconds=86_400.0,
    )  # fmt: skip


def test_each_item_is_delivered_once_and_again_when_it_is_overdue(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    waits = [item("1"), item("2")]
    with WebhookReceiver() as hook, serving(mail_server()) as mail:
        configured = settings(tmp_path, hook.port, mail.server_address[1])
        first = InboxDelivery(configured, tmp_path, lambda: tuple(waits))
        first.deliver_once()
        first.deliver_once()
        first.close()
        second = InboxDelivery(configured, tmp_path, lambda: tuple(waits))
        second.deliver_once()
        assert len(hook.taken) == len(mail.letters) == 1, "a restart repeats nothing"
        waits[0] = item("1", InboxState.OVERDUE)
        hook.status = 503
        second.deliver_once()
        assert len(hook.taken) == 1 and len(mail.letters) == 2, "one receiver waits for no other"
        hook.status = 204
        second.deliver_once()
        second.close()
    headers, body = hook.taken[0]
    identity, moment, signature = (headers[f"webhook-{name}"] for name in ("id", "timestamp", "signature"))
    check_webhook(SECRET.encode(), identity, moment, signature, body, now_seconds=int(time.time()))
    assert [one["id"] for one in json.loads(body)["items"]] == ["approval:1", "approval:2"]
    assert [one["state"] for one in json.loads(hook.taken[1][1])["items"]] == ["overdue"]
    letter = message_from_string(mail.letters[0], policy=default)
    assert letter["Subject"] == "kvcustody: 2 wait for somebody" and letter["To"] == "dpo@example.org"
    assert "revision 1 waits" in mail.letters[0] and mail.logins, "it signed in"
    assert "1 overdue" in message_from_string(mail.letters[1], policy=default)["Subject"]
    said = "".join(capfd.readouterr())
    assert "inbox not delivered" in said and SECRET not in said and PASSWORD not in said
    assert SECRET not in repr(configured) and PASSWORD not in repr(configured)


def test_what_is_not_closed_is_refused(tmp_path: Path) -> None:
    made = settings(tmp_path, 1, 1)
    (tmp_path / "mail.key").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        InboxDelivery(made, tmp_path, lambda: ())
    with pytest.raises(ValueError, match="this machine only"):
        InboxMail(server="mail.example.org:25", sender="a@b", to=("c@d",), tls="none")
