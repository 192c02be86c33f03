"""Acts on the ledger itself beside a server that is running on it: they work, and take nothing of the server's over."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
from sqlalchemy import select
from typer.testing import CliRunner, Result

from kvcustody.audit.store.schema.ledger import events, incarnations, workers
from kvcustody.console.main import app
from kvcustody.errors import LedgerError
from kvcustody.governance.service.access import local_administration
from kvcustody.governance.service.access.local_administration import local_name
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.idempotency import IdempotencyClaim
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.governance.service.service import Service, open_local_service, open_service
from kvcustody.governance.service.settings import Webhook
from standins.waiting import until

OWN = {  # parts that begin something by themselves
    "attempts", "dead_workers", "figures", "inbox_delivery", "ingest", "jobs", "measuring", "policy_work", "scheduler",
    "signer", "sinks",
}  # fmt: skip


@pytest.fixture
def running(make_service: Callable[..., Service], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Service:
    """A service that runs, whose settings commands find in the environment."""
    key = tmp_path / "hook.key"
    key.write_bytes(bytes(32))
    key.chmod(0o600)
    hook = Webhook(name="siem", url="http://127.0.0.1:1/", key_path=key, shape="leaf")
    service = make_service(webhooks=(hook,))
    for name in ("database_url", "state_path", "signing_key_path"):
        monkeypatch.setenv(f"KVCUSTODY_SERVICE_{name.upper()}", str(getattr(service.settings, name)))
    hooks = json.dumps([{"name": "siem", "url": hook.url, "key_path": str(key), "shape": "leaf"}])
    monkeypatch.setenv("KVCUSTODY_SERVICE_WEBHOOKS", hooks)
    monkeypatch.chdir(tmp_path)
    return service


def run(*words: str) -> Result:
    found = CliRunner().invoke(app, [*words])
    structlog.reset_defaults()  # its log ends with it: the service of the test has one of its own
    return found


def done(*words: str) -> Any:
    found = run(*words, "--json")
    assert found.exit_code == 0, (words, found.output)
    return json.loads(found.stdout)


def written_by(service: Service, kind: str) -> set[str]:
    """Who wrote the leaves of a kind."""
    query = select(workers.c.name).join(incarnations, incarnations.c.worker == workers.c.id)
    query = query.join(events, events.c.incarnation == incarnations.c.id).where(events.c.kind == kind)
    with service.reading() as connection:
        return set(connection.scalars(query))


def test_a_principal_is_disabled_beside_the_server_that_knows_them(
    running: Service, make_client: Any, make_people: Any
) -> None:
    people, client = make_people(running), make_client(running)
    people.add("olga", Role.KEY_CUSTODIAN)
    people.add("carl", Role.AUDITOR)
    assert client("GET", "/v1/whoami", people["carl"]).status_code == 200, "control"
    assert done("principal", "disable", "carl")["disabled_us"] is not None
    until(lambda: client("GET", "/v1/whoami", people["carl"]).status_code == 401)
    assert client("GET", "/v1/whoami", people["olga"]).status_code == 200
    assert written_by(running, "principal-changed") == {"control-plane", "control-plane.local"}
    asked = ("audit", "query", "--kind", "principal-changed", "--actor", local_name())
    [shown] = done(*asked)["items"]
    assert shown["leaf"]["principal"] == "carl"


def test_control_two_servers_of_one_name_are_refused(running: Service) -> None:
    with pytest.raises(LedgerError, match="`control-plane` is already running"):
        open_service(running.settings)


def test_commands_write_one_after_the_other(running: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    enrolled = threading.Event()

    def second() -> None:
        with open_local_service(running.settings) as local:
            local.principals.enrol("second", [Role.AUDITOR], by=local_name())
            enrolled.set()

    waiting = threading.Thread(target=second)
    with open_local_service(running.settings) as local:
        waiting.start()
        local.principals.enrol("first", [Role.AUDITOR], by=local_name())
        assert not enrolled.wait(0.3), "it waits"
    assert enrolled.wait(60)
    waiting.join()
    assert running.principals.find("first") is not None and running.principals.find("second") is not None
    monkeypatch.setattr(local_administration, "TURN_SECONDS", 0.1)
    with open_local_service(running.settings):
        found = run("principal", "disable", "first")
    assert found.exit_code == 2 and "another command is writing as `control-plane.local`" in found.output


def test_what_a_request_of_the_server_holds_stays_its_own(running: Service) -> None:
    """Its claim, its job in work, and its queue of jobs."""
    claim = running.answers.claim("ann", "a-key", b"a request")
    assert isinstance(claim, IdempotencyClaim)
    begun, end = threading.Event(), threading.Event()

    def work(progress: Any) -> dict[str, Any]:
        begun.set()
        end.wait(60)
        return {}

    job = running.jobs.start("scan", work, principal="ann", tenant=None, parameters={})
    begun.wait(60)
    done("principal", "add", "carl", "--role", "auditor")
    done("scan", "start")  # a job of the command's own
    with pytest.raises(ProblemError, match="first request is still running"):
        running.answers.claim("ann", "a-key", b"a request")
    assert running.jobs.get(job.job, principal="ann").state == "running"
    end.set()
    until(lambda: running.jobs.get(job.job, principal="ann").ended_us is not None)
    assert running.jobs.get(job.job, principal="ann").state == "finished"
    running.answers.free([running.settings.name])
    claimed = running.answers.claim("ann", "a-key", b"a request")
    assert isinstance(claimed, IdempotencyClaim), "control: whoever has the server's name frees it"


def test_a_command_opens_no_part_that_it_does_not_use(running: Service) -> None:
    with open_local_service(running.settings) as local:
        local.principals.enrol("carl", [Role.AUDITOR], by=local_name())
        assert not OWN & vars(local).keys()
    assert vars(running).keys() >= OWN, "control: a server opens all of them"


def test_sinks_and_the_signing_key_are_the_servers(running: Service) -> None:
    assert running.signer is not None and running.signer.at_work
    before = running.settings.signing_key_path.read_bytes()
    [sink] = done("service", "sinks")["items"]
    assert sink["name"] == "siem"
    refusals = "ask it with --server", "a process signs with this key"
    for words, refusal in zip(
        (("service", "detach-sink", "siem", "--reason", "a trial"), ("keys", "rotate-signing")),
        refusals,
        strict=True,
    ):
        found = run(*words)
        assert found.exit_code == 2 and refusal in found.output, (words, found.output)
    assert running.sinks.listed()[0].attached
    assert running.settings.signing_key_path.read_bytes() == before
    running.close()
    assert len(done("keys", "rotate-signing")["items"]) == 2, "control: nobody signs with it now"
    assert running.settings.signing_key_path.read_bytes() != before


def test_a_job_of_the_server_is_not_said_to_be_cancelled(running: Service, make_people: Any) -> None:
    """The server cancels it: the control."""
    make_people(running).add("carl", Role.AUDITOR)
    begun, end = threading.Event(), threading.Event()

    def work(progress: Any) -> dict[str, Any]:
        begun.set()
        until(lambda: end.is_set() or progress.cancelled.is_set())
        return {}

    job = running.jobs.start("check", work, principal="carl", tenant=None, parameters={}).job
    assert begun.wait(10)
    refused = run("job", "cancel", job, "--as", "carl")
    assert refused.exit_code == 2 and "another process runs this job" in refused.stderr
    assert running.jobs.get(job, principal="carl").ended_us is None
    running.jobs.cancel(job, principal="carl")
    until(lambda: running.jobs.get(job, principal="carl").ended_us is not None)
