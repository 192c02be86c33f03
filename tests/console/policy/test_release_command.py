"""The release commands at their edges: JSON, breaking the glass, rolling back, a database as store, refusals."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import structlog
from sqlalchemy import select
from typer.testing import CliRunner

from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.ledger import events
from kvcustody.console.main import app
from kvcustody.policies import library


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A database; the recorded session of docs/tutorials/first-policy.md has a folder."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("KVCUSTODY_"):
            monkeypatch.delenv(name)
    for name in ("ada", "grace", "brock"):
        assert run("key", f"{name}.key", "--name", name)["name"] == name
    run("trust", "trust.toml", "--audience", "prod", "--author", "ada.key.pub", "--approver", "grace.key.pub",
        "--break-glass", "brock.key.pub", "--folder", "release")  # fmt: skip
    text = library.source("regulated-saas")
    Path("policy.yaml").write_text(text)
    Path("narrow.yaml").write_text(text.replace("idle: 30m", "idle: 20m"))
    yield "sqlite:///release.db"
    structlog.reset_defaults()


def run(*words: str, code: int = 0) -> Any:
    """A command with `--json`; its document, or its one line of error."""
    answer = CliRunner().invoke(app, ["policy", *words, "--json"])
    assert answer.exit_code == code, answer.output
    return orjson.loads(answer.stdout) if code < 2 else answer.output


def released(store: str) -> None:
    run("propose", "policy.yaml", "--signing-key", "ada.key", "--note", "first", "--store", store)
    cells = run("review", "1", "--store", store)["cells"]
    for opening in run("review", "1", "--store", store)["missing_consents"]:
        raise AssertionError(opening)
    run("approve", "1", "--signing-key", "grace.key", "--cells", cells, "--store", store)
    assert run("activate", "1", "--signing-key", "grace.key", "--store", store)["stage"] is None


@pytest.mark.system("the command rolls back to another revision")
def test_from_a_glass_broken_to_a_rollback(store: str, tmp_path: Path) -> None:
    _without_sharing()
    released(store)
    options = ("--signing-key", "brock.key", "--reason", "leak suspected", "--store", store)
    broken = run("break-glass", "--document", "narrow.yaml", "--minutes", "30", *options)
    assert (broken["revision"], broken["verdict"]) == (2, "narrower")
    assert "only narrows" in run("break-glass", "--document", "policy.yaml", "--minutes", "30", *options, code=2)
    assert "at most 4 hours" in run("break-glass", "--restore", "1", "--minutes", "241", *options, code=2)
    run("rollback", "1", "--signing-key", "ada.key", "--note", "over", "--store", store)
    cells = run("review", "3", "--store", store)["cells"]
    run("approve", "3", "--signing-key", "grace.key", "--cells", cells, "--store", store)
    run("activate", "3", "--signing-key", "grace.key", "--percent", "12.5", "--store", store)
    found = run("history", "--store", store)
    assert (found["active"], found["staged"], found["stage"]) == (2, 3, "12.5%") and found["glass_broken_until_us"] > 0
    run("activate", "3", "--signing-key", "grace.key", "--store", store)
    assert run("history", "--store", store)["active"] == 3
    assert _recorded(store) == len(run("history", "--store", store)["steps"]) == 8


def _without_sharing() -> None:
    """The example grant and segment of the library policy need owners with keys; here nobody is asked."""
    for name in ("policy.yaml", "narrow.yaml"):
        kept, skipping = [], False
        for line in Path(name).read_text().splitlines():
            if line.startswith(("grants:", "segments:")):
                skipping = True
            elif line and not line[0].isspace() and not line.startswith("#"):
                skipping = False
            if not skipping:
                kept.append(line)
        Path(name).write_text("\n".join(kept) + "\n")


def _recorded(store: str) -> int:
    """How many steps are events in the ledger."""
    engine = open_store(store)
    with engine.connect() as connection:
        count = len(connection.execute(select(events.c.idx).where(events.c.kind == "release-step")).all())
    engine.dispose()
    return count


def test_refusals_are_one_line(store: str) -> None:
    _without_sharing()
    for words, expected in (
        (("review", "1"), "there is no revision `1`"),
        (("activate", "1", "--signing-key", "grace.key"), "there is no revision `1`"),
        (
            ("propose", "policy.yaml", "--signing-key", "grace.key", "--note", "x"),
            "does not have the role author",
        ),
        (("propose", "none.yaml", "--signing-key", "ada.key", "--note", "x"), "No such file"),
        (("propose", "policy.yaml", "--signing-key", "none.key", "--note", "x"), "cannot be opened"),
        (("activate", "1", "--signing-key", "grace.key", "--percent", "120"), "not between 0 and 100"),
    ):
        line = run(*words, "--store", store, code=2)
        assert expected in line and line.count("\n") == 1, line
    assert "no such folder" in run("history", "--store", "elsewhere", code=2)
    assert "name the ledger's database by its URL" in run("history", "--store", "ledger", code=2)


def test_a_key_is_never_overwritten(store: str) -> None:
    before = Path("ada.key").read_bytes()
    assert "already exists" in run("key", "ada.key", "--name", "eve", code=2)
    assert Path("ada.key").read_bytes() == before and Path("ada.key").stat().st_mode & 0o777 == 0o600
    assert "File exists" in run(
        "trust",
        "trust.toml",
        "--audience",
        "x",
        "--author",
        "ada.key.pub",
        "--approver",
        "grace.key.pub",
        code=2,
    )
