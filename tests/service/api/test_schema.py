"""The API document against a server on loopback: every operation, all checks, wrong data, chains of requests.

What is checked is schemathesis' own: no server errors; statuses, headers, media types and schemas as documented; wrong
data refused, right data taken; credentials demanded; nothing that was removed is used. Each operation is called by
somebody who may. `KVCUSTODY_SCHEMA_EXAMPLES` sets the examples of an operation.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from kvcustody.governance.api import openapi_document
from kvcustody.governance.api.app import create_app
from kvcustody.governance.service.access.roles import Permission, Role
from standins.service.service_world import Worker, register, ship, who_may

pytestmark = pytest.mark.system

HOOKS = """
import schemathesis

@schemathesis.serializer("application/x-ndjson")
def lines(ctx, value):
    return value.encode() if isinstance(value, str) else b"not a text"
"""
EXAMPLES = int(os.environ.get("KVCUSTODY_SCHEMA_EXAMPLES", "1"))


@pytest.fixture(scope="module")
def server(service, people, client) -> Iterator[str]:
    worker = Worker()
    register(client, people["worker"], worker)
    ship(client, people["worker"], worker, worker.batch([worker.started(), *worker.request("acme")]))
    config = uvicorn.Config(create_app(service), port=0, log_config=None, lifespan="off", ws="none")
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    while not running.started:
        time.sleep(0.01)
    port = running.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    running.should_exit = True
    thread.join()


def _who(people: Any, action: str) -> str:
    """Somebody who may do it; own keys end by one who does nothing else."""
    return people[Role.KEY_CUSTODIAN.value] if action == Permission.SELF else who_may(people, action)


# Where data that fits its schema may be refused all the same, and why no schema can say it.
REFUSES = {
    **dict.fromkeys(
        (
            "getCoverage",
            "getShowback",
            "listPrefixes",
            "listTiers",
            "getRoutes",
            "listRouteReceipts",
            "listRouteFindings",
        ),
        422,
    ),  # `since` after `until`
    "proveConsistency": 422,  # `old_size` over `size`
    "listResidencies": 422,  # those who see all have to name the tenant
    "getSubject": 422,  # those who see all have to name the tenant
    "previewErasure": 422,  # a subject or session without its tenant
    "makeProcessingRecord": 422,  # `policy` is a document
    "makeReport": 422,  # `since` after `until`, a checkpoint to extend that is newer
    "makeReportSchedule": 422,  # a zone or a destination that there is none of
    "requestWorkersErasure": 422,  # a selector that a worker did not write
    "checkLedger": 422,  # a text that is no public key
    "shipBatch": "400, 422",  # NDJSON of leaves
    **dict.fromkeys(
        ("lintPolicy", "testPolicy", "diffPolicy", "provePolicy", "simulatePolicy", "explainDecision"), 422
    ),  # a document
}


def _configuration(document: dict[str, Any], people: Any) -> str:
    lines = ["[generation]", f"max-examples = {EXAMPLES}", "deterministic = true", 'database = "none"', ""]
    for item in document["paths"].values():
        for operation in item.values():
            action, name = operation.get("x-kvcustody-action"), operation["operationId"]
            if action is None:
                continue
            parameters = {parameter["name"] for parameter in operation.get("parameters", ())}
            expected = "200, 201, 202, 204, 401, 403, 404, 409"
            expected += ", 400" * ("cursor" in parameters)  # a cursor is opaque: most texts are none
            expected += ", 422" * ("Idempotency-Key" in parameters)  # a key that came before with another body
            expected += ", 428" * ("If-Match" in parameters or "if-match" in parameters)
            expected += f", {REFUSES[name]}" if name in REFUSES else ""
            lines += ["[[operations]]", f'include-operation-id = "{name}"']
            lines += [f'headers = {{ Authorization = "Bearer {_who(people, action)}" }}']
            lines += ["[operations.checks]", f"positive_data_acceptance.expected-statuses = [{expected}]", ""]
    return "\n".join(lines)


def _run(server: str, service: Any, people: Any, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "openapi.json").write_bytes(openapi_document.document())
    (folder / "schemathesis.toml").write_text(_configuration(openapi_document.whole_document(), people))
    command = [
        sys.executable,
        "-m",
        "schemathesis.cli",
        "--config-file",
        "schemathesis.toml",
        "run",
        "openapi.json",
    ]
    command += ["--url", server, "--no-color", "--checks", "all", "--continue-on-failure", *arguments]
    command += ["--request-timeout", "40", "--max-response-time", "40"]  # a long poll waits up to 30 s
    (folder / "hooks.py").write_text(HOOKS)
    environment = {
        **os.environ,
        "SCHEMATHESIS_HOOKS": "hooks",
        "PYTHONPATH": str(folder),
        "PYTHONUTF8": "1",
        "NO_COLOR": "1",
        "COLUMNS": "160",
    }
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=1800, env=environment
    )
    if "KVCUSTODY_SCHEMA_LOG" in os.environ:
        Path(os.environ["KVCUSTODY_SCHEMA_LOG"]).write_text(done.stdout + done.stderr)
    return done


def _clean(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0 and "Failures:" not in done.stdout, done.stdout[-20_000:] + done.stderr[-3000:]
    found = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert found is not None and int(found[2]) >= 50, done.stdout[-3000:]


def test_every_operation_is_as_documented(server: str, service, people, tmp_path: Path) -> None:
    _clean(_run(server, service, people, tmp_path, "--phases", "examples"))


@pytest.mark.soak
def test_every_operation_with_every_check_and_chains_of_requests(server: str, service, people, tmp_path: Path) -> None:
    _clean(_run(server, service, people, tmp_path, "--phases", "examples,coverage,fuzzing,stateful"))


def test_a_wrong_document_would_be_noticed(server: str, service, people, tmp_path: Path, monkeypatch) -> None:
    """Positive control: the same run over a document that promises another field finds it."""
    document, whole = json.loads(openapi_document.document()), openapi_document.whole_document()
    document["components"]["schemas"]["Whoami"]["required"].append("shoe_size")
    document["paths"] = {"/v1/whoami": document["paths"]["/v1/whoami"]}
    monkeypatch.setattr(openapi_document, "document", lambda: json.dumps(document).encode())
    monkeypatch.setattr(openapi_document, "whole_document", lambda: whole | {"paths": document["paths"]})
    done = _run(server, service, people, tmp_path, "--phases", "examples,coverage")
    assert done.returncode == 1
    assert "Response violates schema" in done.stdout and "shoe_size" in done.stdout
