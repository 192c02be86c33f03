"""`kvcustody apikey engine`: keys are made, shown once, listed without a trace of them, and revoked; mistakes teach."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcustody.clock import SystemClock
from kvcustody.console.main import app
from kvcustody.errors import IdentityError
from kvcustody.governance.credentials.api_key_file import EngineKeys, read_keys

KEYS = "api-keys.yaml"
DOCUMENT = """\
schema: kvcustody/identity@1
api_keys: {path: api-keys.yaml}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def group(command: str) -> str:
    return "identity" if command == "check" else "apikey engine"


def run(*arguments: str, stdin: str | None = None) -> Any:
    return CliRunner().invoke(app, [*group(arguments[0]).split(), *arguments], input=stdin)


def speaks_for(key: str) -> str:
    return EngineKeys(Path(KEYS), SystemClock()).find(key).tenant


def test_a_new_key_opens_for_its_tenant_and_is_shown_once() -> None:
    result = run("issue", "acme-ci", "--tenant", "acme")
    assert result.exit_code == 0
    key = result.stdout.strip()
    assert speaks_for(key) == "acme"
    assert key not in result.stderr and key not in Path(KEYS).read_text()
    assert Path(KEYS).stat().st_mode & 0o077 == 0
    digest = read_keys(Path(KEYS)).keys[0].digest
    for listed in (run("list"), run("list", "--json")):
        assert "acme-ci" in listed.stdout
        assert key not in listed.output and digest not in listed.output


def test_every_part_of_an_entry_arrives() -> None:
    run(
        *("issue", "hr", "--tenant", "acme", "--subject", "bot", "--classification", "secret"),
        *("--route", "/v1/hr", "--issuer", "own", "--operator", "--until", "2027-04-01", "--json"),
    )
    (row,) = json.loads(run("list", "--json").stdout)["keys"]
    assert row == {
        "name": "hr",
        "tenant": "acme",
        "issuer": "own",
        "subject": "bot",
        "classification": "secret",
        "route": "/v1/hr",
        "operator": True,
        "until": "2027-04-01",
        "past": row["past"],
    }


def test_a_key_past_its_date_is_told_from_others() -> None:
    run("issue", "old", "--tenant", "a", "--until", "2020-01-01")
    run("issue", "new", "--tenant", "a", "--until", "2999-01-01")
    assert [row["past"] for row in json.loads(run("list", "--json").stdout)["keys"]] == [True, False]
    assert "past its date" in run("list").stdout


def test_a_revoked_key_opens_nothing() -> None:
    key = json.loads(run("issue", "one", "--tenant", "a", "--json").stdout)["key"]
    other = json.loads(run("issue", "two", "--tenant", "b", "--json").stdout)["key"]
    assert speaks_for(key) == "a"
    assert run("revoke", "one").exit_code == 0
    with pytest.raises(IdentityError):
        speaks_for(key)
    assert speaks_for(other) == "b"


def test_an_existing_key_is_read_from_a_descriptor_and_not_echoed() -> None:
    old = "an-old-key-of-theirs-0001"
    read, write = os.pipe()
    os.write(write, old.encode() + b"\n")
    os.close(write)
    result = run("issue", "old", "--tenant", "acme", "--key-fd", str(read), "--json")
    assert json.loads(result.stdout)["key"] is None
    assert old not in result.output and speaks_for(old) == "acme"


MISTAKES = [
    (("issue", "x"), "missing option '--tenant'"),
    (("issue", "x", "--tenant", ""), "--tenant: is empty"),
    (("issue", "x\ty", "--tenant", "a"), "the name: has the character U+0009"),
    (("issue", "x", "--tenant", "a", "--route", "v1"), "--route: must begin with `/`"),
    (("issue", "x", "--tenant", "a", "--until", "soon"), "--until: `soon` is not a date"),
    (("issue", "x", "--tenant", "a", "--key-fd", "1000"), "--key-fd: descriptor `1000` gives no text"),
    (("issue", "x", "--tenant", "a", "--file", "absent/keys.yaml"), "absent/keys.yaml: no such folder"),
    (("revoke", "x"), "api-keys.yaml: does not exist"),
    (("list",), "api-keys.yaml: does not exist"),
    (("check",), "kvcustody-identity.yaml: cannot be read"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[" ".join(a) for a, _ in MISTAKES])
def test_a_mistake_is_one_line_and_changes_nothing(arguments: tuple[str, ...], message: str, folder: Path) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and f"KVC100: {message}" in lines[0], result.stderr
    assert not (folder / KEYS).exists()


def test_a_name_that_is_taken_or_unknown() -> None:
    run("issue", "one", "--tenant", "a")
    before = Path(KEYS).read_bytes()
    assert "exists; revoke it first" in run("issue", "one", "--tenant", "b").stderr
    assert "`two`: is not in" in run("revoke", "two").stderr
    assert Path(KEYS).read_bytes() == before


def test_a_document_is_checked_with_the_files_that_it_names() -> None:
    Path("identity.yaml").write_text(DOCUMENT)
    assert "api-keys.yaml: cannot be read" in run("check", "identity.yaml").stderr
    run("issue", "one", "--tenant", "a")
    found = json.loads(run("check", "identity.yaml", "--json").stdout)
    assert found["api_keys"]["keys"] == 1 and found["status"] == "usable" and "/health" in found["open_paths"]
    Path(KEYS).chmod(0o666)
    result = run("check", "identity.yaml")
    assert result.exit_code == 2 and "chmod 600" in result.stderr


def test_all_that_is_wrong_is_reported_at_once() -> None:
    issuer = "  - {issuer: i, keys: absent.json, audience: a, claims: {tenant: t}}\n"
    Path("identity.yaml").write_text(DOCUMENT + "issuers:\n" + issuer)
    result = run("check", "identity.yaml")
    assert result.exit_code == 2
    assert "api-keys.yaml" in result.stderr and "absent.json" in result.stderr
    Path("identity.yaml").write_text("schema: kvcustody/identity@1\nopen_path: []\n")
    assert "identity.yaml:2:1: `open_path` unknown field" in run("check", "identity.yaml").stderr


@pytest.mark.parametrize("command", ["check", "issue", "revoke", "list"])
def test_help_teaches_by_example(command: str) -> None:
    shown = run(command, "--help")
    assert shown.exit_code == 0 and f"{group(command)} {command}" in shown.stdout
