"""A Python client that openapi-python-client makes of the API document, in an environment of its own, on a real server.

Every operation is made but the one whose body is NDJSON. Those that need nothing of a caller are called, each with the
first key that may ask it.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvcustody.governance.api import openapi_document
from kvcustody.governance.api.declarations import every_operation
from kvcustody.governance.service.access.roles import Role
from standins.tool_environment import programs_of

pytestmark = pytest.mark.system
NDJSON = "shipBatch"
CALLS = """
import importlib, inspect, json, pkgutil, sys
import kvcustody_client.api as api
from kvcustody_client import AuthenticatedClient

server, *keys = sys.argv[1:]
clients = [AuthenticatedClient(base_url=server, token=key) for key in keys]
found = {}
for module in pkgutil.walk_packages(api.__path__, "kvcustody_client.api."):
    name = module.name.rpartition(".")[2]
    call = getattr(importlib.import_module(module.name), "sync_detailed", None)
    if call is None or name.startswith(("stream", "end_", "revoke")):
        continue
    if [each for each in inspect.signature(call).parameters.values() if each.default is each.empty][1:]:
        continue
    for client in clients:
        answer = call(client=client)
        found[name] = [int(answer.status_code), type(answer.parsed).__name__]
        if answer.status_code < 400:
            break
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def environment() -> Path:
    return programs_of(".venv-client", "openapi-python-client", "0.29.0")


def generated(environment: Path, folder: Path, document: bytes) -> str:
    """Make the client in `folder`; what was said of it."""
    (folder / "openapi.json").write_bytes(document)
    command = [
        str(environment / "openapi-python-client"),
        "generate",
        "--path",
        "openapi.json",
        "--meta",
        "none",
    ]
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": f"{environment}:/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def module_of(operation: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", operation).lower()


def test_every_operation_is_made_and_those_without_arguments_answer(
    environment: Path, server: Any, shipped: Any, people: Any, tmp_path: Path
) -> None:
    api = every_operation()
    said = generated(environment, tmp_path, openapi_document.document())
    assert said.count("WARNING") == 1 and "batches/{sequence}" in said, said
    made = {path.stem for path in (tmp_path / "kvcustody_client" / "api").glob("*/*.py")} - {"__init__"}
    assert made == {module_of(name) for name in api.operations.by_name if name != NDJSON}

    (tmp_path / "calls.py").write_text(CALLS)
    keys = [people[role.value] for role in (Role.AUDITOR, Role.KEY_CUSTODIAN, Role.DPO, Role.OPERATOR, Role.AUTHOR)]
    done = subprocess.run(
        [str(environment / "python"), "calls.py", server.address, *keys],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answered = {name: kind for name, (status, kind) in json.loads(done.stdout).items() if status < 400}
    assert len(answered) >= 30, done.stdout
    assert answered["list_events"] == "EventPage" and answered["whoami"] == "Whoami"


def test_a_document_with_an_open_reference_would_be_noticed(environment: Path, tmp_path: Path) -> None:
    """Positive control: one shared parameter is missing, and the generator says so."""
    document = json.loads(openapi_document.document())
    del document["components"]["parameters"]["limit"]
    assert generated(environment, tmp_path, json.dumps(document).encode()).count("WARNING") > 1
