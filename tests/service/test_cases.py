"""Cases over the API and, with --server, from the command line: who may, what is refused, what is shown and told."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog
from typer.testing import CliRunner

from kvcustody.audit.keep.purge_and_legal_hold import lift_hold, place_hold
from kvcustody.audit.store.schema.ledger import events
from kvcustody.audit.tlog.signing_key import read_signing_key
from kvcustody.console.main import app
from kvcustody.governance.control_plane import connection
from kvcustody.times import DAY_US, iso
from standins.audit.documents import signed_certificate, verify_certificate
from standins.service.service_world import Worker, register, ship

CASES = "/v1/cases"


@pytest.fixture(autouse=True)
def quiet() -> None:
    """The server is in this process: its log would be on the stdout that is read here."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def opened(client: Any, key: str, subject: str = "user-1", **more: Any) -> str:
    body = {"tenant": "acme", "subject": subject, "right": "erasure", "channel": "mail"} | more
    answer = client("POST", CASES, key, json=body)
    assert answer.status_code == 201, answer.content
    return str(answer.json()["case_id"])


def stepped(client: Any, key: str, case: str, step: str, **more: Any) -> Any:
    return client("POST", f"{CASES}/{case}/steps", key, json={"step": step} | more)


def view(client: Any, key: str, case: str) -> Any:
    return client("GET", f"{CASES}/{case}", key).json()


def test_a_case_is_of_a_pseudonym_and_every_leaf_of_it_names_nobody(shipped: Any, client: Any, people: Any) -> None:
    case = opened(client, people["dpo"])
    assert stepped(client, people["dpo"], case, "identity", outcome="confirmed").status_code == 200
    found = client("GET", f"{CASES}/{case}", people["dpo"])
    assert b"user-1" not in found.content
    assert found.json()["subject"] in shipped.names_of("acme", "user-1")
    assert [step["actor"] for step in found.json()["steps"]] == ["dpo"] and found.json()["strangers"] == []
    with shipped.reading() as connection:
        kinds = ("case-opened", "case-step")
        leaves = [bytes(row.leaf) for row in connection.execute(events.select().where(events.c.kind.in_(kinds)))]
    assert len(leaves) >= 2 and not any(b"user-1" in leaf for leaf in leaves)
    named = stepped(client, people["dpo"], case, "exempt", ground="17(3)(e)", reason="a claim of User-1")
    assert named.status_code == 409 and "names the person" in named.json()["detail"]
    other = stepped(client, people["dpo"], case, "exempt", ground="17(3)(e)", reason="a claim of user-9")
    assert other.status_code == 200, "control: another name is not the person's"


def test_a_short_id_of_a_subject_is_no_part_of_another_word(shipped: Any, client: Any, people: Any) -> None:
    """Control: as a word of its own it names the person, and so does one of a script without spaces."""
    dpo, digit = people["dpo"], ""
    case = opened(client, dpo, "7", channel="letter 17")
    assert stepped(client, dpo, case, "identity", outcome="confirmed").status_code == 200
    while "7" not in digit:
        digit = client("POST", "/v1/erasures", dpo, json={"tenant": "acme", "subject": "7"}).json()["erasure"]
    assert stepped(client, dpo, case, "erasure", about=digit).status_code == 200
    exempt = partial(stepped, client, dpo, case, "exempt", ground="17(3)(e)")
    assert exempt(reason="a claim of 2027, art. 17").status_code == 200
    named = exempt(reason="a claim of 7.")
    assert named.status_code == 409 and "`reason` names the person as `7`" in named.json()["detail"]
    other = opened(client, dpo, "太郎")
    named = stepped(client, dpo, other, "exempt", ground="17(3)(e)", reason="これは太郎の主張です")
    assert named.status_code == 409 and "names the person" in named.json()["detail"]


def test_from_receipt_to_the_letter(shipped: Any, client: Any, people: Any) -> None:
    dpo = people["dpo"]
    case = opened(client, dpo, "user-2")
    early = stepped(client, dpo, case, "erasure", about="0" * 32)
    assert early.status_code == 409 and "confirm the person's identity first" in early.json()["detail"]
    assert stepped(client, dpo, case, "identity", outcome="confirmed").status_code == 200
    unknown = stepped(client, dpo, case, "erasure", about="0" * 32)
    assert unknown.status_code == 409 and "is none of this tenant" in unknown.json()["detail"]
    erasures = {
        who: client("POST", "/v1/erasures", dpo, json={"tenant": tenant, "subject": who}).json()["erasure"]
        for tenant, who in (("acme", "user-1"), ("acme", "user-2"))
    }
    wrong = stepped(client, dpo, case, "erasure", about=erasures["user-1"])
    assert wrong.status_code == 409 and "of another person" in wrong.json()["detail"]
    assert stepped(client, dpo, case, "erasure", about=erasures["user-2"]).status_code == 200
    open_yet = stepped(client, dpo, case, "decide", outcome="erased")
    assert open_yet.status_code == 409 and "is not complete: no answer of worker" in open_yet.json()["detail"]
    absent = stepped(client, dpo, case, "decide", outcome="not-found")
    assert absent.status_code == 409 and "1 residencies of this person" in absent.json()["detail"]
    found = view(client, dpo, case)
    assert [one["erasure"] for one in found["erasures"]] == [erasures["user-2"]]
    assert found["erasures"][0]["state"] == "open" and found["duties"][0].startswith("wait for the erasure")
    unwritten = client("POST", f"{CASES}/{case}/letter", dpo, json=LETTER, keyed=False)
    assert unwritten.status_code == 409 and "no step `decide`" in unwritten.json()["detail"]
    refused = {"outcome": "refused", "ground": "12(5)", "reason": "the ninth this week"}
    assert stepped(client, dpo, case, "decide", **refused).status_code == 200
    letter = client("POST", f"{CASES}/{case}/letter", dpo, json=LETTER, keyed=False)
    text = letter.content.decode()
    assert "Ada Lovelace" in text and "the ninth this week" in text and "12(5)" in text
    assert "complaint with a supervisory authority" in text and case in text
    sent = hashlib.sha256(letter.content).hexdigest()
    assert stepped(client, dpo, case, "answer", about="letter", digest=sent).json()["state"] == "answered"
    again = client("POST", f"{CASES}/{case}/letter", dpo, json=LETTER, keyed=False).content
    assert hashlib.sha256(again).hexdigest() == sent, "the same letter is the same bytes"
    over = stepped(client, dpo, case, "exempt", ground="17(3)(e)", reason="a claim")
    assert over.status_code == 409 and "the person was answered" in over.json()["detail"]


LETTER = {"addressee": "Ada Lovelace\nBonn", "sender": "Example AG", "date": "2026-06-20"}


@pytest.mark.parametrize(("form", "begins"), [("text", b"About your"), ("html", b"<!DOCTYPE html>"), ("pdf", b"%PDF-")])
def test_a_letter_is_text_html_or_pdf(shipped: Any, client: Any, people: Any, form: str, begins: bytes) -> None:
    case = opened(client, people["dpo"])
    reason = "our <systems> are three"
    assert stepped(client, people["dpo"], case, "extend", ground="complexity", reason=reason).status_code == 200
    asked = LETTER | {"kind": "extension", "form": form}
    answer = client("POST", f"{CASES}/{case}/letter", people["dpo"], json=asked, keyed=False)
    assert answer.status_code == 200 and answer.content.startswith(begins)
    assert b"<systems>" not in answer.content or form == "text"


def test_not_found_is_for_a_person_of_whom_there_is_nothing(shipped: Any, client: Any, people: Any) -> None:
    case = opened(client, people["dpo"], "nobody-of-acme")
    assert stepped(client, people["dpo"], case, "identity", outcome="confirmed").status_code == 200
    assert stepped(client, people["dpo"], case, "decide", outcome="not-found").json()["outcome"] == "not-found"
    assert view(client, people["dpo"], case)["recipients"] == []


def test_what_the_ledger_says_later_stands_beside_the_decision(shipped: Any, client: Any, people: Any) -> None:
    case = opened(client, people["dpo"], "user-late")
    assert stepped(client, people["dpo"], case, "identity", outcome="confirmed").status_code == 200
    assert stepped(client, people["dpo"], case, "decide", outcome="not-found").status_code == 200
    assert view(client, people["dpo"], case)["contradictions"] == []
    worker = Worker()
    assert register(client, people["worker"], worker).status_code == 200
    made = [worker.started(), *worker.request("acme", "user-late")]
    assert ship(client, people["worker"], worker, worker.batch(made)).status_code == 200
    [said] = view(client, people["dpo"], case)["contradictions"]
    assert "1 residencies of this person" in said


def test_a_deadline_near_or_missed_is_in_the_inbox_and_the_metrics(shipped: Any, client: Any, people: Any) -> None:
    now_us = shipped.clock.utc_us()
    near = opened(client, people["dpo"], received=now_us - 26 * DAY_US)
    missed = opened(client, people["dpo"], received=now_us - 60 * DAY_US)
    far = opened(client, people["dpo"], received=now_us - 2 * DAY_US)
    items = {item["about"]: item for item in client("GET", "/v1/inbox", people["dpo"]).json()["items"]}
    assert (items[near]["state"], items[missed]["state"]) == ("soon", "overdue") and far not in items
    assert items[missed]["page"] == f"/cases/{missed}" and "user-1" not in items[missed]["text"]
    mine = {item["about"] for item in client("GET", "/v1/inbox", people["tenant-admin@acme"]).json()["items"]}
    assert {near, missed} <= mine
    theirs = {item["about"] for item in client("GET", "/v1/inbox", people["tenant-admin@labs"]).json()["items"]}
    assert not {near, missed} & theirs
    late = view(client, people["dpo"], missed)
    assert late["state"] == "missed" and any("it is already late" in duty for duty in late["duties"])
    shipped.measuring.ledger.ask()
    text = client("GET", "/metrics", people["operator"]).text
    assert 'kvcustody_subject_cases{state="missed"} 1' in text and 'subject_cases{state="near"} 1' in text
    overdue = re.search(r"^kvcustody_subject_case_overdue_seconds_max (\S+)$", text, re.MULTILINE)
    assert overdue and float(overdue[1]) > 0
    future = {"tenant": "acme", "subject": "user-1", "right": "erasure", "channel": "mail"}
    answer = client("POST", CASES, people["dpo"], json=future | {"received": now_us + DAY_US})
    assert answer.status_code == 422 and "in the future" in answer.json()["detail"]


def test_a_tenants_administrator_has_its_own_cases_alone(shipped: Any, client: Any, people: Any) -> None:
    mine = opened(client, people["tenant-admin@acme"], tenant=None)
    assert view(client, people["tenant-admin@acme"], mine)["case_id"] == mine
    assert client("GET", f"{CASES}/{mine}", people["tenant-admin@labs"]).status_code == 404
    assert stepped(client, people["tenant-admin@labs"], mine, "identity", outcome="confirmed").status_code == 404
    assert stepped(client, people["auditor"], mine, "identity", outcome="confirmed").status_code == 403
    listed = client("GET", CASES, people["tenant-admin@labs"]).json()["items"]
    assert listed == [] and client("GET", f"{CASES}?tenant=acme", people["tenant-admin@labs"]).status_code == 404
    unnamed = {"subject": "user-1", "right": "erasure", "channel": "mail"}
    assert client("POST", CASES, people["dpo"], json=unnamed).status_code == 422


def test_holds_of_the_person_their_tenant_and_everything_are_shown_and_no_others(
    shipped: Any, client: Any, people: Any
) -> None:
    case = opened(client, people["dpo"])
    asked = client("POST", "/v1/erasures", people["dpo"], json={"tenant": "acme", "subject": "user-1"}).json()
    held = {
        "one": ("acme", "user-1"),
        "other": ("acme", "user-2"),
        "all": (None, None),
        "labs": ("labs", None),
    }
    with shipped.reading() as connection:
        clear = shipped.subject_keys is None
        assert connection is not None
    for name, (tenant, subject) in held.items():
        place_hold(
            shipped.engine,
            name,
            tenant,
            subject=subject,
            actor="counsel",
            reason=f"why {name}",
            keys=shipped.subject_keys,
            clear_names=clear,
        )
    try:
        found = view(client, people["dpo"], case)
        assert sorted(hold["hold"] for hold in found["holds"]) == ["all", "one"]
        own = view(client, people["tenant-admin@acme"], case)
        assert {hold["hold"]: hold["reason"] for hold in own["holds"]} == {"all": "", "one": "why one"}
        status = client("GET", f"/v1/erasures/{asked['erasure']}", people["dpo"]).json()
        assert sorted(hold["hold"] for hold in status["holds"]) == ["all", "one"]
        made = client("GET", f"/v1/erasures/{asked['erasure']}/certificate", people["dpo"]).json()
        assert sorted(hold["hold"] for hold in made["holds"]) == ["all", "one"]
        assert "why other" not in json.dumps(made) and "why labs" not in json.dumps(made)
        check_holds(shipped, made)
    finally:
        for name in held:
            lift_hold(shipped.engine, name, actor="counsel", reason="over")
    assert view(client, people["dpo"], case)["holds"] == []
    assert client("GET", f"/v1/erasures/{asked['erasure']}", people["dpo"]).json()["holds"] == []


def check_holds(service: Any, made: Any) -> None:
    """Its leaves show its holds: one that is left out, added or changed is found, whoever signed it."""
    key = read_signing_key(service.settings.signing_key_path)
    vkeys = [str(key.verifier)]
    body = {name: value for name, value in made.items() if name not in ("schema", "signature")}

    def problems(holds: list[Any]) -> tuple[str, ...]:
        return verify_certificate(signed_certificate(body | {"holds": holds}, key).to_bytes(), vkeys).problems

    assert problems(body["holds"]) == (), "control: signed anew it is as it was"
    first, *others = body["holds"]
    for holds in (others, [first | {"reason": "none"}, *others], [*body["holds"], first | {"hold": "more"}]):
        assert any("legal holds" in problem for problem in problems(holds))


def run(*words: str, code: int = 0) -> Any:
    found = CliRunner().invoke(app, [*words])
    assert found.exit_code == code, found.output
    return found.stdout


def test_from_the_command_line_over_a_control_plane(
    shipped: Any, service: Any, server: Any, people: Any, tmp_path: Path
) -> None:
    key = tmp_path / "dpo.key"
    key.write_text(people["dpo"])
    key.chmod(0o600)
    to = ["--server", server.address, "--api-key-file", str(key)]
    wanted = ["--tenant", "acme", "--subject", "user-2", "--right", "access", "--channel", "letter"]
    case = json.loads(run("case", "open", *wanted, *to, "--json"))["case_id"]
    run("case", "step", case, "identity", "--outcome", "confirmed", *to)
    export = tmp_path / "export.json"
    export.write_text(run("subject", "show", "--tenant", "acme", "--subject", "user-2", *to, "--json"))
    run("case", "step", case, "export", "--file", str(export), *to)
    run("case", "step", case, "decide", "--outcome", "given", *to)
    out = tmp_path / "letter"
    made = json.loads(run("case", "letter", case, "--to", "Ada", "--out", str(out), *to, "--json"))
    assert (out / "letter.txt").read_text().count(hashlib.sha256(export.read_bytes()).hexdigest()) == 1
    run("case", "step", case, "answer", "--about", "letter", "--file", str(out / "letter.txt"), *to)
    shown = json.loads(run("case", "show", case, *to, "--json"))
    assert shown["steps"][-1]["digest"] == made["files"]["letter.txt"] and shown["state"] == "answered"
    assert case in run("case", "list", *to) and "answered: access" in run("case", "show", case, *to)
    assert "Ada" not in json.dumps(shown)
    files = ["--ledger", service.settings.database_url]
    for words in (["case", "list"], ["case", "show", case], ["inbox"]):
        asked, read = (json.loads(run(*words, *way, "--json")) for way in (to, files))
        assert asked == read or (words == ["inbox"] and all(item in read["items"] for item in asked["items"]))
    assert shown["received"] and shown["received"] == iso(shown["received_us"])
    refused = CliRunner().invoke(app, ["case", "step", case, "decide", "--outcome", "given", *to])
    assert refused.exit_code == 2 and "the person was answered" in refused.output


def test_a_list_over_a_control_plane_is_read_to_its_end(
    shipped: Any, server: Any, people: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Page by page, here two items each. Control: the first page alone holds two."""
    monkeypatch.setattr(connection, "_ITEMS_A_PAGE", 2)
    key = tmp_path / "dpo.key"
    key.write_text("\ufeff" + people["dpo"])  # as some editors save a file
    key.chmod(0o600)
    to = ["--server", server.address, "--api-key-file", str(key)]
    wanted = ["--tenant", "acme", "--right", "access", "--channel", "letter"]
    mine = {
        json.loads(run("case", "open", *wanted, "--subject", f"s-{number}", *to, "--json"))["case_id"]
        for number in range(5)
    }
    found = json.loads(run("case", "list", *to, "--json"))["items"]
    assert mine <= {case["case_id"] for case in found}
    with connection.ControlPlaneConnection(server.address, people["dpo"]) as plane:
        assert len(plane.get("/v1/cases", limit=2)["items"]) == 2
    assert json.loads(run("inbox", *to, "--json"))["items"] is not None
