"""A name that was typed wrong is refused where it would hold, end or find nothing, with the name that was meant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvcustody.audit.evidence.query.events import EventFilter, find_events
from kvcustody.audit.kinds import DecisionRecorded, KeyEvent, ResidencyOpened, WorkerStarted
from kvcustody.audit.store.database.engine import open_store
from kvcustody.clock import SystemClock
from kvcustody.console import command
from kvcustody.console.main import app
from standins import builders

POLICY = Path(__file__).parents[3] / "policies" / "library" / "regulated-saas.yaml"
Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, migrated: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A command in a folder with a ledger that knows one tenant, `acme`, and one actor, `operator`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVCUSTODY_DATABASE_URL", raising=False)
    now = SystemClock().now_us()
    events = [
        WorkerStarted(now, "w", 8, 1, 4096, "cpu", "test"),
        ResidencyOpened(now, 1, "acme", "alice", None, False, "internal", (), (), ("own",), 1, 9),
        DecisionRecorded(now, "reuse", "deny", "beta", "acme", "internal", ("no",), 1),
        KeyEvent(now, "acme", "made", 1, "operator"),
    ]
    with builders.ledger(migrated, tmp_path / "kvcustody.db") as engine:
        builders.record(engine, tmp_path / "spill", events)
    return lambda *words, **how: CliRunner().invoke(app, list(words), **how)


def events_of(kind: str) -> int:
    engine = open_store("sqlite:///kvcustody.db", read_only=True)
    with engine.connect() as connection:
        found = len(find_events(connection, EventFilter(kinds=(kind,))).rows)
    engine.dispose()
    return found


WHO = ("--actor", "counsel")
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "hold": (("audit", "hold", "place", "case", *WHO, "--reason", "r", "--tenant"), ("acne", "acme"), "acme"),
    "erasures": (("erasure", "list", "--tenant"), ("acne", "acme"), "acme"),
    "query tenant": (("audit", "query", "--tenant"), ("Acme", "acme"), "acme"),
    "query actor": (("audit", "query", "--actor"), ("opertor", "operator"), "operator"),
    "query outcome": (("audit", "query", "--outcome"), ("dney", "deny"), "deny"),
    "query kind": (("audit", "query", "--kind"), ("key-evnt", "key-event"), "key-event"),
    "tail tenant": (("audit", "tail", "--tenant"), ("acne", "acme"), "acme"),
    "coverage": (("coverage", "show", "--tenant"), ("acne", "acme"), "acme"),
    "erasure": (("erasure", "request", "--yes", "--tenant"), ("acne", "acme"), "acme"),
}


@pytest.mark.parametrize("case", CASES)
def test_an_unknown_name_is_refused_with_the_one_that_was_meant(run: Run, case: str) -> None:
    words, (wrong, right), meant = CASES[case]
    before = events_of("legal-hold") + events_of("erasure-requested")
    refused = run(*words, wrong)
    assert refused.exit_code != 0, refused.output
    said = str(refused.exception or "") + refused.output
    assert f"`{wrong}`" in said and f"did you mean `{meant}`?" in said
    assert events_of("legal-hold") + events_of("erasure-requested") == before, "nothing is on record"
    good = run(*words, right)
    assert good.exit_code == 0, (good.output, good.exception)


def test_an_actor_that_is_known_but_not_in_what_was_asked_about_is_no_error(run: Run) -> None:
    found = run("audit", "query", "--actor", "operator", "--since", "2100-01-01", "--json")
    assert found.exit_code == 0, (found.output, found.exception)


def test_an_unknown_framework_is_refused_with_the_one_that_was_meant(run: Run) -> None:
    refused = run("report", "make", "--framework", "gdrp")
    assert refused.exit_code != 0 and "did you mean `gdpr`?" in str(refused.exception) + refused.output


def test_never_names_tenants_of_the_policy_alone(run: Run) -> None:
    """What must never be read by a tenant that does not exist is proved without saying anything."""
    from kvcustody.policies.workbench.validate import load_table

    known = load_table(POLICY).policy.tenants[0].id
    refused = run("policy", "prove", str(POLICY), "--never", f"{known}x:*")
    assert refused.exit_code != 0 and f"did you mean `{known}`?" in str(refused.exception) + refused.output
    assert run("policy", "prove", str(POLICY), "--never", f"{known}:{known}").exit_code in (0, 1)


def test_an_erasure_of_a_whole_tenant_asks_once_more(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("erasure", "request", "--tenant", "acme")
    asked = run(*words)
    assert asked.exit_code != 0 and "--yes" in str(asked.exception) + asked.output
    assert events_of("erasure-requested") == 0
    assert run(*words, "--subject", "alice", "--subject-names", "clear").exit_code == 0, (
        "control: one subject is named already"
    )
    for typed, wanted in (("yes", 1), ("acne", 1), ("acme", 2)):
        with monkeypatch.context() as patch:
            patch.setattr(command, "_terminal", lambda: True)
            said = run(*words, input=f"{typed}\n")
        assert events_of("erasure-requested") == wanted, (typed, said.output, said.exception)
    assert run(*words, "--yes").exit_code == 0 and events_of("erasure-requested") == 3
