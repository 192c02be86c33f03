"""What is in effect is what workers run: a policy from a file, told by pages, the API, reports and commands."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcustody.audit.kinds import GENERATED, REPLAYED, PolicyActivated, PolicyText, WorkerStarted
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.write.event_writer import EventWriter
from kvcustody.clock import SystemClock
from kvcustody.console.main import app
from kvcustody.console.web.app import Console
from kvcustody.governance.api.app import create_app
from kvcustody.governance.release import startup_policy
from kvcustody.governance.service.epochs import scopes_in_effect
from kvcustody.governance.service.service import Service
from kvcustody.governance.worker import open_foundation
from kvcustody.policies import library
from kvcustody.policies.document.digest import digest
from kvcustody.policies.reading.load_policy import load_policy
from standins import PLACE
from standins.service.file_worker import open_file_worker

SOURCE = library.source("regulated-saas")
DIGEST = digest(load_policy(SOURCE, name="policy"))
GRANT = "labs-reads-acme"
NONE_READS = "No tenant may read another"
PEOPLE = ("auditor", "author", "approver", "operator", "dpo", "tenant-admin@acme")
PAGES = ("/", "/policy", "/grants")


class Watcher:
    """A service on the ledger that workers write, asked as its people ask: by pages, and by the API."""

    def __init__(self, folder: Path, service: Service, people: Any, client: Any) -> None:
        self.folder, self.service = folder, service
        self._people, self._client = people, client
        self._cookies: dict[str, str] = {}

    def api(self, path: str, who: str = "auditor", body: Any = None, *, status: int = 200) -> Any:
        method = "GET" if body is None else "POST"
        how = {} if body is None else {"json": body}
        answer = self._client(method, path, self._people[who], **how)
        assert answer.status_code == status, answer.text
        return answer.json()

    def page(self, path: str, who: str = "auditor") -> str:
        if who not in self._cookies:
            form = {"key": self._people[who]}
            answer = self._client("POST", "/console/login", data=form, keyed=False)
            assert answer.status_code == 303, answer.text
            self._cookies[who] = answer.headers["set-cookie"].partition(";")[0]
        answer = self._client("GET", "/console" + path, headers={"Cookie": self._cookies[who]})
        assert answer.status_code == 200, answer.text
        return re.sub(r"\s+", " ", html.unescape(answer.text))


@pytest.fixture
def watcher(
    tmp_path: Path, make_service: Callable[..., Service], make_people: Any, make_client: Any
) -> Iterator[Watcher]:
    (tmp_path / "policy.yaml").write_text(SOURCE)
    service = make_service(signing_key_path=tmp_path / "service.key")
    client = make_client(service)
    client.gate = None
    kind = type(client)
    found = kind(create_app(service, pages=Console(service)))
    yield Watcher(tmp_path, service, make_people(service), found)
    found.close()


def in_effect(watcher: Watcher) -> tuple[bool, list[tuple[str, str, str, list[str]]]]:
    found = watcher.api("/v1/policies/in-effect")
    items = [(one["name"], one["digest"], one["source"], one["workers"]) for one in found["items"]]
    return found["at_work"], items


def test_a_policy_from_a_file_is_told_everywhere(watcher: Watcher) -> None:
    with open_file_worker(watcher.folder):
        assert in_effect(watcher) == (True, [("regulated-saas", DIGEST, "document", ["gpu-0"])])
        overview, policy, grants = (watcher.page(path) for path in PAGES)
        assert "Isolation proved" in overview and "regulated-saas, in effect since" in overview
        assert "No policy" not in overview
        assert "on gpu-0" in policy and "a file of the worker" in policy and "No policy is in effect" not in policy
        assert GRANT in grants and NONE_READS not in grants
        assert "name: regulated-saas" in watcher.page("/policy/draft", "author")
        asked = f"/decisions?reader=acme-labs&owner=acme&classification=internal&via=grant&grant={GRANT}"
        assert f"<strong>permit</strong>, by <code>{GRANT}" in watcher.page(asked, "approver")
        assert "which workers run from a file" in watcher.page(f"/decisions/rule?id={GRANT}&revision=1")
        own = watcher.api("/v1/policies/grants", "tenant-admin@acme")
        assert GRANT in [item["id"] for item in own["items"]] and own["at_work"] and not own["unknown"]
        assert GRANT in watcher.page("/grants", "tenant-admin@acme")
        quotas = watcher.api("/v1/quotas", "operator")
        assert {row["tenant"]: row["guaranteed"] for row in quotas["items"]}["acme"] is not None
        record = watcher.api("/v1/reports:processing", "dpo", {})
        assert (record["policy"], record["policy_digest"], record["run_by"]) == (
            "regulated-saas",
            DIGEST,
            ["gpu-0"],
        )
        assert GRANT in json.dumps(record["recipients"])
        other = watcher.api("/v1/reports:processing", "dpo", {"policy": library.source("single-org")})
        assert other["run_by"] == [], "control: a policy that nobody runs is said to be run by nobody"
        same = watcher.api("/v1/policies:diff", "author", {"source": SOURCE})
        assert same["verdict"] == "equivalent"
        made = command(watcher, "report", "ropa", "--ledger", ledger(watcher))
        assert made["record"]["policy_digest"] == DIGEST and made["record"]["run_by"] == ["gpu-0"]


def ledger(watcher: Watcher) -> str:
    return f"sqlite:///{watcher.folder}/ledger.db"


def command(watcher: Watcher, *words: str, code: int = 0) -> Any:
    out = ("--out", str(watcher.folder / "out")) if words[0] == "report" else ()
    ran = CliRunner().invoke(app, [*words, *out, "--json"])
    assert ran.exit_code == code, ran.output
    return json.loads(ran.stdout) if code == 0 else ran.output


def says_nothing_is_in_effect(watcher: Watcher, *, was: bool) -> None:
    """Nor was anything before, unless it `was`: then the record of that period has it, with its end."""
    assert in_effect(watcher) == (False, [])
    overview, policy, grants = (watcher.page(path) for path in PAGES)
    assert "No policy" in overview and "No policy is in effect" in policy
    assert NONE_READS in grants and GRANT not in grants
    assert watcher.api("/v1/policies/grants", "tenant-admin@acme")["items"] == []
    if not was:
        never = "no policy was in effect in the period"
        assert never in watcher.api("/v1/reports:processing", "dpo", {}, status=409)["detail"]
        assert never in command(watcher, "report", "ropa", "--ledger", ledger(watcher), code=2)
        return
    [one] = watcher.api("/v1/reports:processing", "dpo", {})["policies"]
    assert one["digest"] == DIGEST and one["since_us"] < one["until_us"] and one["workers"] == ["gpu-0"]


def test_after_a_clean_stop_nothing_is_in_effect(watcher: Watcher) -> None:
    says_nothing_is_in_effect(watcher, was=False)
    with open_file_worker(watcher.folder):
        assert in_effect(watcher)[0]
    says_nothing_is_in_effect(watcher, was=True)


@pytest.mark.system("a killed worker's policy counts as no longer in effect")
def test_after_a_kill_it_is_told_until_its_end_is_on_record(watcher: Watcher) -> None:
    script = PLACE / "service" / "file_worker.py"
    process = subprocess.Popen(
        [sys.executable, str(script), str(watcher.folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and "ready\n" in iter(process.stdout.readline, "")
    process.kill()
    process.wait(60)
    assert in_effect(watcher) == (True, [("regulated-saas", DIGEST, "document", ["gpu-0"])])
    assert GRANT in watcher.page("/grants")
    spill = str(watcher.folder / "gpu-0")
    command(watcher, "scan", "close-dead", "gpu-0", "--spill", spill, "--ledger", ledger(watcher))
    says_nothing_is_in_effect(watcher, was=True)


@pytest.mark.system("workers with different policies are shown as one")
def test_workers_that_run_different_policies_are_told_apart(watcher: Watcher) -> None:
    (watcher.folder / "other.yaml").write_text(library.source("single-org"))
    with open_file_worker(watcher.folder), open_file_worker(watcher.folder, "gpu-1", "other.yaml"):
        at_work, items = in_effect(watcher)
        assert at_work and sorted((name, workers) for name, _, _, workers in items) == [
            ("regulated-saas", ["gpu-0"]),
            ("single-org", ["gpu-1"]),
        ]
        assert "Workers run different policies." in watcher.page("/policy")
        assert GRANT in watcher.page("/grants")
        record = watcher.api("/v1/reports:processing", "dpo", {})
        assert sorted((one["name"], *one["workers"]) for one in record["policies"]) == [
            ("regulated-saas", "gpu-0"),
            ("single-org", "gpu-1"),
        ]
        quotas = watcher.api("/v1/quotas", "operator")
        assert [len(one["workers"]) for one in quotas["policies"]] == [1, 1] and quotas["revision"] == 0
        assert quotas["items"] == [], "no share is everybody's"


def only_the_digest_is_known(watcher: Watcher) -> None:
    assert in_effect(watcher) == (True, [("regulated-saas", DIGEST, "unknown", ["gpu-0"])])
    overview, policy, grants = (watcher.page(path) for path in PAGES)
    assert "Not known here" in overview and "Isolation proved" not in overview + policy
    assert "not on record" in policy
    assert NONE_READS not in grants and "the digest alone" in grants and DIGEST in grants
    assert "the digest alone" in watcher.page("/grants", "tenant-admin@acme")
    assert watcher.api("/v1/policies/grants", "tenant-admin@acme")["unknown"] == [DIGEST]
    record = watcher.api("/v1/reports:processing", "dpo", {})
    assert [(one["digest"], one["source"]) for one in record["policies"]] == [(DIGEST, "unknown")]
    assert not record["recipients"] and not record["time_limits"], "nothing is claimed of what is not known"


@pytest.mark.system("a replayed policy counts as in effect")
@pytest.mark.parametrize("origin", ["", REPLAYED, GENERATED])
def test_what_a_replay_runs_is_in_effect_nowhere(watcher: Watcher, tmp_path: Path, origin: str) -> None:
    clock = SystemClock()
    about = (clock.now_us(), "replay", 8, 1, 64, "cpu", "test", 1, 0, origin)
    engine = open_store(watcher.folder / "ledger.db")
    writer = EventWriter(engine, worker="replay", clock=clock, spill_directory=tmp_path / "replay.spill")
    writer.submit([WorkerStarted(*about)])
    writer.submit_durable(PolicyActivated(clock.now_us(), 1, "replayed", "shared", DIGEST, "replay"))
    at_work, items = in_effect(watcher)
    writer.close()
    engine.dispose()
    assert (at_work, len(items)) == ((False, 0) if origin else (True, 1)), "control: an engine's is"


def test_a_worker_of_which_no_leaf_says_what_it_runs_is_named(
    watcher: Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_foundation, "activation_events", lambda table, at_us, actor: [])
    with open_file_worker(watcher.folder) as worker:
        assert worker.writer.flush()
        assert watcher.api("/v1/policies/in-effect")["unsaid"] == ["gpu-0"]
        overview, policy, grants = (watcher.page(path) for path in PAGES)
        assert "is on record of gpu-0" in overview and "No leaf says what gpu-0 runs" in policy
        assert NONE_READS not in grants and "No leaf says what gpu-0 run" in grants
        assert "Nobody else may read" not in watcher.page("/grants", "tenant-admin@acme")


def test_doors_name_by_the_scopes_of_what_workers_run(watcher: Watcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scopes_in_effect, "_SECONDS", 0.0)
    assert not watcher.service.name_scopes.now().is_known, "the control: nobody runs anything"
    with open_file_worker(watcher.folder) as worker:
        assert worker.writer.flush()
        entry = worker.governor.table.tenant("acme")
        assert entry is not None
        assert watcher.service.name_scopes.now().of("corp", "acme").value == entry.scope.name.lower()


def test_where_the_document_is_not_on_record_nothing_is_claimed_of_it(
    watcher: Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup_policy, "documents_on_record", lambda table, at_us: [])
    with open_file_worker(watcher.folder):
        only_the_digest_is_known(watcher)


def test_a_record_reads_the_ledger_after_its_checkpoint_is_chosen(
    watcher: Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker writes while the record is made: what is read has the checkpoint that covers it."""
    cover, signer = watcher.service.cover, watcher.service.signer
    assert signer is not None
    sizes: list[int] = []
    with open_file_worker(watcher.folder) as worker:

        def cover_more() -> None:
            now_us = SystemClock().now_us()
            worker.writer.submit_durable(PolicyActivated(now_us, 1, "later", "shared", DIGEST, "test"))
            cover()
            sizes.append(signer.last_head().size)

        monkeypatch.setattr(watcher.service, "cover", cover_more)
        record = watcher.api("/v1/reports:processing", "dpo", {})
    assert record["checkpoint"] == sizes[-1] > 0


def test_another_document_than_the_activations_counts_for_nothing(
    watcher: Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may write leaves says of a policy with a grant that it has none: its digest does not let it."""

    def forged(table: Any, at_us: int) -> list[PolicyText]:
        return [PolicyText(at_us, table.digest, 1, 1, SOURCE.replace(GRANT, "nobody-reads"))]

    monkeypatch.setattr(startup_policy, "documents_on_record", forged)
    with open_file_worker(watcher.folder):
        only_the_digest_is_known(watcher)
