"""Every operation of the API has its command: what each takes, on the ledger itself and against a server."""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import httpx
import pytest
from pydantic import BaseModel, Field
from typer.testing import CliRunner

from kvcustody.audit.tlog.signing_key import create_signing_key, read_signing_key
from kvcustody.console import command_table
from kvcustody.console.api import operation_commands
from kvcustody.console.api.client import asking
from kvcustody.console.api.ledger_asker import open_ledger
from kvcustody.console.api.operation_commands import read_commands
from kvcustody.console.command_table import every_command
from kvcustody.console.main import app
from kvcustody.console.options import ControlPlane, ServiceSource
from kvcustody.errors import ServiceError
from kvcustody.governance.api.declarations import Declarations, every_operation
from kvcustody.governance.api.given import CallerDep, DeskDep
from kvcustody.governance.api.local_calls import LocalCalls
from kvcustody.governance.api.openapi_document import document as api_document
from kvcustody.governance.api.openapi_document import whole_document
from kvcustody.governance.api.operation_request import OperationRequest
from kvcustody.governance.api.operations import tiers
from kvcustody.governance.control_plane.connection import ControlPlaneConnection
from kvcustody.governance.observability.logs import configure
from kvcustody.governance.release.trust import write_trust
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.roles import OF_TENANTS, Permission, Reach, Role, reach
from kvcustody.governance.service.operations.operation import Operation
from kvcustody.governance.service.operations.pages import page
from kvcustody.governance.service.operations.parameters import Cursor, Limit, Query
from kvcustody.governance.service.page_cursor import CursorBinding
from kvcustody.governance.service.service import open_service
from kvcustody.governance.service.settings import ServiceSettings
from standins.console.web_world import SIGNERS, World, policy_source, running

DOCS = Path(__file__).resolve().parents[2] / "docs"
MADE = "kvcustody.console.api.api_commands"  # the module of commands that are made of the document
SIGNED = "a step of a release is signed where the command runs, with its number: it is taken once"
OTHERWISE_NAMED = {  # parameters of operations that a command written by hand takes by another name
    "principal add": {"roles": "--role", "kind": "--machine", "key_days": "--days"},
    "apikey revoke": {"name": "--of"},
    "apikey keep": {"name": "--of"},
    "erasure request": {"labels": "--label"},
    "case step": {"case": "CASE", "step": "STEP", "digest": "--file"},
    "policy enforce": {"tenants": "--tenant", "until_us": "--until"},
    "report schedules add": {"formats": "--format", "destinations": "--to"},
    "report ropa": {"controllers": "--controller-of"},
}
RELEASE_STEPS = [f"policy {verb}" for verb in ("propose", "approve", "consent", "activate", "revoke", "break-glass")]
NOT_TAKEN = {  # parameters that a command written by hand does not take, and why
    "inbox": dict.fromkeys(("cursor", "limit"), "it shows every page"),
    **{step: dict.fromkeys(("record", "Idempotency-Key"), SIGNED) for step in RELEASE_STEPS},
}
NOT_TAKEN["policy activate"] |= {"if-match": "the ETag of the release that the step was signed for is sent"}
OF_NO_SERVICE = {  # commands that take neither a service's settings nor `--as`, and why
    "apikey rotate": "it is asked of a server alone, by whoever has the key",
    "report ropa": "on the ledger itself it is made of the ledger, and nothing is put on record",
    **dict.fromkeys(RELEASE_STEPS, "a folder or a database holds the release, and the signing key says who acts"),
}


class CommandOf(NamedTuple):
    """An operation as the API's document has it, and its command."""

    name: str
    declared: dict[str, Any]
    words: str
    command: Any

    @property
    def is_made(self) -> bool:
        """Whether nobody wrote the command."""
        return bool(self.command.callback.__module__ == MADE)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return whole_document()


@pytest.fixture(scope="module")
def operations(document: dict[str, Any]) -> list[CommandOf]:
    with_command, declared = dict(every_command()), every_operation().by_name
    return [
        CommandOf(name, one, words, with_command.get(words))
        for item in document["paths"].values()
        for one in item.values()
        for name in [one["operationId"]]
        for words in [declared[name].operation.command]
    ]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def wanted_of(operation: CommandOf, schemas: dict[str, Any]) -> list[str]:
    """The names of everything that an operation takes."""
    names = [given["name"] for given in operation.declared.get("parameters", ())]
    content = operation.declared.get("requestBody", {}).get("content", {}).get("application/json")
    if content is not None:
        names += schemas[content["schema"]["$ref"].rpartition("/")[2]]["properties"]
    return names


def taken_by(command: Any) -> set[str]:
    """The options of a command, and the names of its arguments as its help has them."""
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    shown = {str(one.metavar or one.name).upper().rstrip(".") for one in arguments}
    return shown | {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)}


def missing_of(operation: CommandOf, schemas: dict[str, Any]) -> list[str]:
    """What of an operation its command does not take: the command itself, or parameters."""
    if operation.command is None:
        return [f"{operation.name}: no command"]
    taken, named = taken_by(operation.command), OTHERWISE_NAMED.get(operation.words, {})
    missing = []
    for name in wanted_of(operation, schemas):
        flag = "--" + name.replace("_", "-").lower()
        ways = {named.get(name, flag), name.upper()} | ({"--oldest-first"} if name == "order" else set())
        if not ways & taken and name not in NOT_TAKEN.get(operation.words, {}):
            missing.append(f"{operation.name}: {name}")
    return missing


def test_every_operation_has_its_command_with_every_parameter(
    document: dict[str, Any], operations: list[CommandOf]
) -> None:
    """Control: an operation that the commands do not know, and one of another's command, are named."""
    schemas = document["components"]["schemas"]
    assert [missing for each in operations for missing in missing_of(each, schemas)] == []
    by_name = {each.name: each for each in operations}
    report = by_name["makeReport"]
    assert missing_of(report._replace(command=None), schemas) == ["makeReport: no command"]
    swapped = missing_of(report._replace(command=by_name["whoami"].command), schemas)
    assert "makeReport: framework" in swapped
    of_hand = by_name["takeCaseStep"]
    assert "takeCaseStep: digest" in missing_of(of_hand._replace(words="case letter"), schemas)


def test_what_a_command_takes_otherwise_or_not_is_still_so(
    document: dict[str, Any], operations: list[CommandOf]
) -> None:
    schemas, by_words = document["components"]["schemas"], {each.words: each for each in operations}
    for words, names in (OTHERWISE_NAMED | NOT_TAKEN).items():
        assert names.keys() <= set(wanted_of(by_words[words], schemas)), words
        assert not by_words[words].is_made, words
    for words, named in OTHERWISE_NAMED.items():
        assert set(named.values()) <= taken_by(by_words[words].command), words
    for words, names in NOT_TAKEN.items():
        flags = {"--" + name.replace("_", "-").lower() for name in names}
        assert not flags & taken_by(by_words[words].command), words


def test_every_command_asks_a_server_or_the_ledger_itself(operations: list[CommandOf]) -> None:
    of_settings = {"--config", "--as"}
    for operation in operations:
        taken = taken_by(operation.command)
        assert {"--server", "--api-key-file", "--ca", "--json"} <= taken, operation.words
        assert (of_settings <= taken) is (operation.words not in OF_NO_SERVICE), operation.words
    assert OF_NO_SERVICE.keys() <= {operation.words for operation in operations}


def test_shell_completion_knows_the_commands() -> None:
    environment = {
        "_KVCUSTODY_COMPLETE": "complete_bash",
        "COMP_WORDS": "kvcustody audit latest",
        "COMP_CWORD": "2",
    }
    found = CliRunner().invoke(app, [], env=environment, prog_name="kvcustody")
    assert "latest-checkpoint" in found.output


def test_bounds_of_parameters_are_those_of_json_schema(document: dict[str, Any]) -> None:
    """What reads the document knows `minimum`, and not what Python's models call it."""
    parameters = [
        one for item in document["paths"].values() for each in item.values() for one in each.get("parameters", ())
    ]
    limits = [one["schema"] for one in parameters if one["name"] == "limit"]
    assert limits and all((one["minimum"], one["maximum"]) == (1, 1000) for one in limits)
    assert [one for one in parameters if {"ge", "gt", "le", "lt"} & one["schema"].keys()] == []


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, migrated: Path) -> Iterator[World]:
    """A control plane that has released nothing."""
    folder = tmp_path_factory.mktemp("commands")
    shutil.copy(migrated, folder / "ledger.db")
    configure("error", "json")  # the server is in this process, and its log on this stdout
    with running(folder) as opened:
        yield opened


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The requests that commands send to a control plane, as they send them."""
    requests: list[tuple[str, str]] = []
    send = ControlPlaneConnection.request

    def request(self: ControlPlaneConnection, method: str, path: str, **how: Any) -> httpx.Response:
        requests.append((method, path))
        return send(self, method, path, **how)

    monkeypatch.setattr(ControlPlaneConnection, "request", request)
    return requests


def to(world: World, who: str) -> tuple[str, ...]:
    """The options with which somebody asks the control plane."""
    key = world.folder / f"{who}.api"
    key.write_text(world.keys[who])
    key.chmod(0o600)
    return ("--server", world.url, "--api-key-file", str(key))


def is_asked(sent: list[tuple[str, str]], name: str) -> bool:
    """Whether one of the requests is of this operation."""
    operation = every_operation().by_name[name].operation
    return any(method == operation.method and operation.pattern.fullmatch(path) for method, path in sent)


CASE = ("--tenant", "acme", "--subject", "user-1", "--right", "access", "--channel", "mail")
ACTS: dict[str, tuple[str, ...]] = {  # who asks, and with what, beside the words of the command
    "inbox": ("approver",),
    "apikey rotate": ("operator",),
    "principal add": ("bootstrap", "new", "--role", "dpo"),
    "apikey issue": ("bootstrap", "auditor"),
    "principal enable": ("bootstrap", "auditor"),
    "principal disable": ("key-custodian", "nobody"),
    "apikey revoke": ("key-custodian", "0f1e2d3c4b5a"),
    "apikey keep": ("key-custodian", "0f1e2d3c4b5a", "--of", "auditor"),
    "subject show": ("dpo", "--tenant", "acme", "--subject", "user-1"),
    "audit prove": ("auditor", "system", "0"),
    "erasure request": ("dpo", "--tenant", "acme", "--subject", "user-1"),
    "erasure status": ("dpo", "absent"),
    "case open": ("dpo", *CASE),
    "case step": ("dpo", "absent", "identity", "--outcome", "asked"),
    "policy enforce": ("approver", "enforce", "--reason", "test"),
    "report schedules add": ("auditor", "--framework", "soc2", "--every", "monthly"),
    "report schedules pause": ("auditor", "ab12" * 4),
    "report schedules resume": ("auditor", "ab12" * 4),
    "report schedules delete": ("auditor", "ab12" * 4),
    "report retry": ("auditor", "ab12" * 8),
    "report ropa": ("dpo",),
    "showback": ("auditor", "--since", "2026-01-01"),
    "scan worker": ("operator", "worker"),
}


def test_a_command_that_is_written_by_hand_sends_its_operation(
    world: World,
    sent: list[tuple[str, str]],
    operations: list[CommandOf],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Control: what a command sends is no other operation."""
    monkeypatch.chdir(tmp_path)
    of_hand = {each.words: each.name for each in operations if not each.is_made}
    assert of_hand.keys() == ACTS.keys() | set(RELEASE_STEPS)
    for words, (who, *more) in ACTS.items():
        sent.clear()
        told = run(*words.split(), *more, *to(world, who))
        assert is_asked(sent, of_hand[words]), (words, sent, told.output)
        assert not is_asked(sent, "listRevisions"), words


def test_a_step_of_a_release_is_sent_to_its_operation(
    world: World,
    sent: list[tuple[str, str]],
    operations: list[CommandOf],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The steps go through `policy.release_options`. The server refuses the last one: it does not trust the key."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy.yaml").write_text(policy_source())
    names = {each.words: each.name for each in operations}
    trust = world.folder / "trust.toml"

    def step(verb: str, who: str, *more: str, signs: bool = True) -> Any:
        key = ("--signing-key", world.signing_key(who)) if signs else ()
        sent.clear()
        return run("policy", verb, *more, *key, "--trust", str(trust), *to(world, who), "--json")

    def taken(verb: str, who: str, *more: str) -> None:
        told = step(verb, who, *more)
        assert told.exit_code == 0, told.output
        assert is_asked(sent, names[f"policy {verb}"]), sent

    taken("propose", "author", "policy.yaml", "--note", "test")
    review = json.loads(step("review", "approver", "1", signs=False).stdout)
    assert sent and not is_asked(sent, names["policy propose"]), "control: looking takes no step"
    taken("approve", "approver", "1", "--cells", review["cells"])
    for source in sorted({opening["id"] for opening in review["missing_consents"]}):
        taken("consent", "tenant-admin@acme", "1", source)
    taken("activate", "approver", "1")
    taken("revoke", "approver", "labs-reads-acme", "--reason", "test")
    broken = ("break-glass", "break-glass", "--restore", "1", "--minutes", "5", "--reason", "test")
    world_trusts = [
        (str(read_signing_key(Path(world.signing_key(name))).verifier), role) for name, role in SIGNERS.items()
    ]
    brock = create_signing_key(Path(world.signing_key("break-glass")), "brock")
    rows = [*world_trusts, (str(brock.verifier), "break-glass")]
    trust = tmp_path / "trust.toml"
    trust.write_text(write_trust("test", [(key, role, "acme" if role == "owner" else None) for key, role in rows]))
    refused = step(*broken)
    assert refused.exit_code == 2 and is_asked(sent, names["policy break-glass"]), refused.output


def answer(*arguments: str) -> Any:
    found = run(*arguments, "--json")
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)


def settings_in(folder: Path) -> ServiceSettings:
    return ServiceSettings(
        database_url=f"sqlite:///{folder}/ledger.db",
        state_path=folder / "state",
        listen=f"unix:{folder}/api.sock",
        signing_key_path=folder / "signing.key",
        checkpoint_seconds=0.05,
    )


@pytest.fixture
def local(tmp_path: Path, migrated: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a ledger, which the settings of a service name."""
    shutil.copy(migrated, tmp_path / "ledger.db")
    given = settings_in(tmp_path)
    for name in ("database_url", "state_path", "listen", "signing_key_path"):
        monkeypatch.setenv(f"KVCUSTODY_SERVICE_{name.upper()}", str(getattr(given, name)))
    return tmp_path


def test_on_the_ledger_itself(local: Path) -> None:
    made = answer("principal", "add", "vera", "--role", "tenant-viewer", "--tenant", "acme")
    assert made["prefix"] in made["key"]
    [vera] = answer("principal", "list")["items"]
    assert (vera["name"], vera["tenant"]) == ("vera", "acme")
    me = answer("principal", "whoami")
    assert me["name"].startswith("local:") and me["by"] == "local"
    assert answer("principal", "whoami", "--as", "vera")["tenant"] == "acme"
    for words in (
        ("apikey", "list"),
        ("principal", "show"),
    ):  # read of the ledger itself, and through the gate
        assert run(*words, "vera").exit_code == 0, "control"
        assert run(*words, "ver%61").exit_code == 2, "a name is what was typed, and is decoded nowhere"
    refused = run("custody", "totals", "--tenant", "labs", "--as", "vera")
    assert refused.exit_code == 2 and "nothing here" in refused.output
    wrong = run("custody", "coverage", "--since", "2", "--until", "1")
    assert wrong.exit_code == 2 and "must be before" in wrong.output


def test_an_act_with_the_same_key_is_done_once(local: Path) -> None:
    """Control: without the key, or with another, it is done again."""
    again = ("apikey", "issue", "vera", "--idempotency-key")
    answer("principal", "add", "vera", "--role", "auditor")
    made = [answer(*again, key)["prefix"] for key in ("one", "one", "two")]
    made.append(answer("apikey", "issue", "vera")["prefix"])
    assert made[0] == made[1] and len(set(made)) == 3


@pytest.mark.system("a job without a server loses its files")
def test_a_job_on_the_ledger_itself_leaves_its_files(local: Path) -> None:
    made = answer("job", "report", "--framework", "soc2", "--formats", "json", "--out", str(local / "report"))
    [file] = made["result"]["files"]
    assert made["state"] == "finished" and (local / "report" / file["name"]).stat().st_size == file["bytes"]
    scanned = answer("scan", "start")
    assert answer("scan", "show", scanned["result"]["incarnation"], "1")["scan"]["mode"] == "ledger"


def test_against_a_server_and_pages_to_the_last(world: World) -> None:
    there = to(world, "auditor")
    assert answer("principal", "whoami", *there)["name"] == "auditor"
    one = answer("audit", "query", "--limit", "1", *there)
    whole = answer("audit", "query", "--limit", "20", "--all", *there)
    assert one["next"] is not None and whole["next"] is None and len(whole["items"]) > 20
    job = answer("job", "check", "--wait", *there)
    assert job["state"] == "finished" and job["result"]["sound"]
    refused = run("principal", "list", *there)
    assert refused.exit_code == 2 and "forbidden" not in refused.stdout
    assert "TENANT" not in run("audit", "logs", *there).stdout


REFUSED_HERE = {  # reads that the ledger itself refuses whoever may open its files, although a command reaches them
    # It has no trust configuration: it releases no policies.
    **dict.fromkeys(("getRelease", "listReleaseRecords", "listRevisions"), "conflict"),
    # A tenant's own, and a worker's own: asked for `--as` one of theirs.
    **dict.fromkeys(
        ("listConsents", "listOwnGrants", "pullPolicy", "takeEpochs", "takeErasures", "takeScans"),
        "forbidden",
    ),
}


def test_what_needs_no_parameter_is_answered_by_the_ledger_itself(local: Path) -> None:
    """Every read by its command, in one process: what is refused is refused for a reason that is written down."""
    with open_service(settings_in(local)) as service:
        service.principals.enrol("reader", ["auditor"], by="test")
        assert service.signer is not None and service.writer.flush()
        service.signer.sign_once()
    asked = [
        command
        for command in read_commands()
        if command.method == "GET" and not any(part.required for part in command.parts)
    ]
    assert len(asked) > 50 and {command.reads for command in asked} == {True, False}
    source: Any = ServiceSource(ctx=None, plane=ControlPlane())  # type: ignore[arg-type]  # a server alone asks for it
    refused: dict[str, str] = {}
    with asking(source, "whoami") as service_asker, open_ledger(source) as ledger_asker:
        for command in asked:
            asker = ledger_asker if command.reads else service_asker
            try:
                assert asker.ask(OperationRequest("GET", command.path, {}, {}, b"")).status == 200
            except ServiceError as error:
                refused[command.operation] = error.operands["problem"]
    assert refused == REFUSED_HERE


class Shelf(BaseModel):
    """What the new operation lists."""

    name: str = Field(description="What it is called.")
    blocks: int = Field(description="How many blocks it holds.")


class Shelves(BaseModel):
    """The answer of the new operation."""

    items: list[Shelf]
    next: str | None


def shelves(
    desk: DeskDep,
    caller: CallerDep,
    *,
    size: Annotated[str | None, Query(pattern=r"^(small|large)$", description="Only of this size.")] = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> dict[str, Any]:
    """Shelves of a size, with what each holds."""
    sizes = {"small": 1, "large": 64}
    items = [{"name": name, "blocks": held} for name, held in sizes.items() if size in (None, name)]
    return page(desk, CursorBinding("listShelves", caller.name, {"size": size}), items, cursor, limit)


LIST_SHELVES = Operation(
    "listShelves", "GET", "/v1/tiers/shelves", Permission.READ_OPERATIONS, "operations", "tier shelves"
)


@pytest.fixture
def declare(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Declares the new operation beside those of its group, and nothing else; at the end it is gone."""
    caches = (
        every_operation,
        api_document,
        read_commands,
        operation_commands._by_operation,
        command_table._program,
    )

    def forget() -> None:
        for each in caches:
            each.cache_clear()

    def declaring() -> None:
        add_tiers = tiers.add_tiers

        def add(api: Declarations) -> None:
            add_tiers(api)
            api.add(LIST_SHELVES, shelves, answers=Shelves, problems=("cursor-invalid",))

        monkeypatch.setattr(tiers, "add_tiers", add)
        monkeypatch.setattr(operation_commands, "FILE", "absent.json")  # the build writes it anew
        forget()

    forget()
    yield declaring
    monkeypatch.undo()
    forget()


def signs_of(local: Path) -> dict[str, bool]:
    """Where the new operation is to be seen."""
    path, words = LIST_SHELVES.path, LIST_SHELVES.command
    ledger = ("--ledger", f"sqlite:///{local}/ledger.db")
    shown = run(*words.split(), "--size", "large", *ledger)
    needs = Permission.READ_OPERATIONS.value
    row = f"| `GET {path}` | `{words}` | `{needs}` | Shelves of a size, with what each holds."
    commands = command_table.commands_table()
    documented = whole_document()["paths"].get(path, {}).get("get", {})
    return {
        "route in the document": documented.get("operationId") == "listShelves",
        "model in the document": "Shelves" in str(documented.get("responses")),
        "command": shown.exit_code == 0,
        "table": shown.stdout.split() == ["name", "blocks", "large", "64"],
        "in the help": words.split()[-1] in run("tier", "--help").stdout,
        "option with its values": f"| `{words}` | yes | yes | yes | `--size` |" in commands,
        "row in the table of the API": row in runpy.run_path(str(DOCS / "tables.py"))["table"]("api"),
    }


@pytest.mark.system("a declared operation lacks one of its faces")
def test_an_operation_that_is_declared_once_is_everywhere(local: Path, declare: Callable[[], None]) -> None:
    """Control: before it is declared it is nowhere."""
    assert set(signs_of(local).values()) == {False}
    declare()
    found = signs_of(local)
    assert set(found.values()) == {True}, found
    page_of_one = answer("tier", "shelves", "--limit", "1")
    assert [item["name"] for item in page_of_one["items"]] == ["small"] and page_of_one["next"] is not None
    assert len(answer("tier", "shelves", "--limit", "1", "--all")["items"]) == 2
    refused = run("tier", "shelves", "--size", "larg")
    assert refused.exit_code == 2 and "did you mean `large`?" in refused.stderr


def test_an_operation_that_is_declared_once_is_answered_to_those_who_may_ask_it(
    local: Path, declare: Callable[[], None]
) -> None:
    """The matrix of access follows from its action: a role that has it is answered, every other one is refused."""
    declare()
    asked = OperationRequest("GET", LIST_SHELVES.path, {}, {}, b"")
    with open_service(settings_in(local)) as service, LocalCalls(service) as calls:
        answered = {
            role: calls.call(
                Caller("somebody", frozenset({role}), "acme" if role in OF_TENANTS else None, "key"), asked
            )
            for role in Role
        }
    allowed = {role for role in Role if reach(frozenset({role}), Permission.READ_OPERATIONS) is not Reach.NONE}
    assert {role for role, found in answered.items() if found.status == 200} == allowed
    assert {found.status for role, found in answered.items() if role not in allowed} == {403}
    assert {Role.OPERATOR, Role.AUDITOR} <= allowed < set(Role)
