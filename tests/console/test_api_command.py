"""Every operation of the API from the command line, on the ledger itself and against a server; `--json` everywhere."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import uvicorn
from typer.testing import CliRunner

from kvcustody.console.api.client import Where, asking
from kvcustody.console.api.generate_commands import command_name, commands
from kvcustody.console.command_table import every_command
from kvcustody.console.documents import ConsoleDocuments
from kvcustody.console.main import app
from kvcustody.console.options import ControlPlane
from kvcustody.errors import ServiceError
from kvcustody.governance.api.app import create_api, create_app
from kvcustody.governance.observability.logs import configure
from kvcustody.governance.service.service import open_service
from kvcustody.governance.service.settings import ServiceSettings


class Operation(NamedTuple):
    """An operation as the API's document has it, and its command."""

    name: str
    method: str
    path: str
    declared: dict[str, Any]
    command: Any


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return create_api(None).whole_document()


@pytest.fixture(scope="module")
def operations(document: dict[str, Any]) -> list[Operation]:
    with_command = dict(every_command())
    return [
        Operation(name, method.upper(), path, declared, with_command.get(f"api {command_name(name)}"))
        for path, item in document["paths"].items()
        for method, declared in item.items()
        for name in [declared["operationId"]]
    ]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def missing_of(operation: Operation, schemas: dict[str, Any]) -> list[str]:
    """What of an operation its command does not take: the command itself, or parameters."""
    if operation.command is None:
        return [f"{operation.name}: no command"]
    parameters = operation.command.params
    options = {flag for each in parameters for flag in (*each.opts, *each.secondary_opts)}
    names = {each.name for each in parameters}
    wanted = [
        f"--{given['name'].replace('_', '-').lower()}"
        for given in operation.declared.get("parameters", ())
        if f"in_{given['name']}" not in names
    ]
    content = operation.declared.get("requestBody", {}).get("content", {}).get("application/json")
    if content is not None:
        schema = schemas[content["schema"]["$ref"].rpartition("/")[2]]
        wanted += [f"--{name.replace('_', '-')}" for name in schema["properties"]]
    return [f"{operation.name}: {flag}" for flag in wanted if flag not in options]


def test_every_operation_has_its_command_with_every_parameter(
    document: dict[str, Any], operations: list[Operation]
) -> None:
    """Control: an operation that the commands do not know, and one of another's command, are named."""
    schemas = document["components"]["schemas"]
    assert [missing for each in operations for missing in missing_of(each, schemas)] == []
    made = {(each.operation, each.method, each.path) for each in commands(document)}
    assert made == {(each.name, each.method, each.path) for each in operations}
    by_name = {each.name: each for each in operations}
    report = by_name["makeReport"]
    assert missing_of(report._replace(command=None), schemas) == ["makeReport: no command"]
    swapped = missing_of(report._replace(command=by_name["whoami"].command), schemas)
    assert "makeReport: --framework" in swapped


def test_shell_completion_knows_the_commands() -> None:
    environment = {
        "_KVCUSTODY_COMPLETE": "complete_bash",
        "COMP_WORDS": "kvcustody api list-ev",
        "COMP_CWORD": "2",
    }
    found = CliRunner().invoke(app, [], env=environment, prog_name="kvcustody")
    assert "list-events" in found.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("api-command")


def settings_in(folder: Path) -> ServiceSettings:
    return ServiceSettings(
        database_url=f"sqlite:///{folder}/ledger.db",
        state_path=folder / "state",
        listen=f"unix:{folder}/api.sock",
        signing_key_path=folder / "signing.key",
        checkpoint_seconds=0.05,
    )


@pytest.fixture(scope="module")
def environment(folder: Path) -> dict[str, str]:
    given = settings_in(folder)
    assert run("db", "upgrade", "--ledger", given.database_url).exit_code == 0
    names = ("database_url", "state_path", "listen", "signing_key_path")
    return {f"KVCUSTODY_SERVICE_{name.upper()}": str(getattr(given, name)) for name in names}


@pytest.fixture
def local(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def answer(*arguments: str) -> Any:
    found = run("api", *arguments, "--json")
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)


def test_on_the_ledger_itself(folder: Path, local: None) -> None:
    made = answer("enrol-principal", "--name", "vera", "--roles", "tenant-viewer", "--tenant", "acme")
    assert made["principal"]["name"] == "vera" and made["principal"]["tenant"] == "acme"
    me = answer("whoami")
    assert me["name"].startswith("local:") and me["by"] == "local"
    assert answer("whoami", "--as", "vera")["tenant"] == "acme"
    refused = run("api", "list-totals", "--tenant", "labs", "--as", "vera")
    assert refused.exit_code == 2 and "nothing here" in refused.output.lower()
    wrong = run("api", "get-coverage", "--since", "2", "--until", "1")
    assert wrong.exit_code == 2 and "must be before" in wrong.output


@pytest.mark.system("a job without a server loses its files")
def test_a_job_on_the_ledger_itself_leaves_its_files(folder: Path, local: None) -> None:
    made = answer("make-report", "--framework", "soc2", "--formats", "json", "--out", str(folder / "report"))
    [file] = made["result"]["files"]
    assert made["state"] == "finished" and (folder / "report" / file["name"]).stat().st_size == file["bytes"]
    scanned = answer("start-scan")
    assert answer("get-scan", scanned["result"]["incarnation"], "1")["scan"]["mode"] == "ledger"


def test_against_a_server_and_pages_to_the_last(folder: Path) -> None:
    configure("error", "json")  # the server is in this process, and its log on this stdout
    with open_service(settings_in(folder), documents=ConsoleDocuments()) as service:
        service.principals.enrol("ann", ["auditor"], by="test")
        key = folder / "ann.key"
        key.write_text(service.principals.issue_key("ann", days=1, by="test").key)
        key.chmod(0o600)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        config = uvicorn.Config(create_app(service), port=port, log_config=None, lifespan="off", ws="none")
        running = uvicorn.Server(config)
        thread = threading.Thread(target=running.run, daemon=True)
        thread.start()
        while not running.started:
            time.sleep(0.01)
        to = ("--server", f"http://127.0.0.1:{port}", "--api-key-file", str(key))
        try:
            assert answer("whoami", *to)["name"] == "ann"
            one = answer("list-events", "--limit", "1", *to)
            whole = answer("list-events", "--limit", "2", "--all", *to)
            assert one["next"] is not None and whole["next"] is None and len(whole["items"]) > 3
            job = answer("check-ledger", "--wait", *to)
            assert job["state"] == "finished" and job["result"]["sound"]
            refused = run("api", "list-principals", *to)
            assert refused.exit_code == 2 and "forbidden" not in refused.stdout
            assert "TENANT" not in run("api", "list-logs", *to).stdout
        finally:
            running.should_exit = True
            thread.join()


WITHOUT_A_COMMAND: dict[str, str] = {}  # an operation that no command reaches, and why; there is none
REFUSED_HERE = {  # reads that the ledger itself refuses whoever may open its files, although a command reaches them
    # It has no trust configuration: it releases no policies.
    **dict.fromkeys(("getRelease", "listReleaseRecords", "listRevisions"), "conflict"),
    # A tenant's own, and a worker's own: asked for `--as` one of theirs.
    **dict.fromkeys(
        ("listConsents", "listOwnGrants", "pullPolicy", "takeErasures", "takeScans"), "forbidden"
    ),
}


def test_operations_without_a_command_are_listed_with_their_reason(
    document: dict[str, Any], operations: list[Operation]
) -> None:
    reached = {command.operation for command in commands(document)}
    declared = {operation.name for operation in operations}
    assert declared - reached == set(WITHOUT_A_COMMAND) and reached <= declared
    assert all(WITHOUT_A_COMMAND.values())


def test_every_command_asks_a_server_or_the_ledger_itself(operations: list[Operation]) -> None:
    every_one_takes = {"--server", "--api-key-file", "--ca", "--config", "--as", "--json"}
    for operation in operations:
        flags = {flag for part in operation.command.params for flag in part.opts}
        assert every_one_takes <= flags, operation.name


def test_what_needs_no_parameter_is_answered_by_the_ledger_itself(
    folder: Path, local: None, document: dict[str, Any]
) -> None:
    """Every read by its command, in one process: what is refused is refused for a reason that is written down."""
    with open_service(settings_in(folder)) as service:
        service.principals.enrol("reader", ["auditor"], by="test")
        assert service.signer is not None and service.writer.flush()
        service.signer.sign_once()
    asked = [
        command
        for command in commands(document)
        if command.method == "GET" and not any(part.required for part in command.parts)
    ]
    assert len(asked) > 30
    refused: dict[str, str] = {}
    with asking(Where(plane=ControlPlane())) as asker:
        for command in asked:
            try:
                assert asker.ask("GET", command.path, query={}, headers={}, body=None).status == 200
            except ServiceError as error:
                refused[command.operation] = error.operands["problem"]
    assert refused == REFUSED_HERE
