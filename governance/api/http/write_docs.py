"""Writes docs/api.md, problems.md and metrics.md from what is served.

`python -m kvcustody.governance.api.http.write_docs` writes them. With `--check` nothing is written, and the exit code
says whether the pages are as they would be written.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from kvcustody.governance.api.app import create_api
from kvcustody.governance.observability.metrics import metrics_table
from kvcustody.governance.service.access.roles import PERMISSIONS, Permission, Reach
from kvcustody.governance.service.problem_details import problems_table
from kvcustody.governance.service.settings import service_settings_table

FOLDER = Path("docs")
_API = """# The API

Version 1, over HTTP. This page is written from the API document (`GET /v1/openapi.json`, OpenAPI 3.1, with an example
for every operation) by `python -m kvcustody.governance.api.http.write_docs`.

- **Credential**: `Authorization: Bearer …` with an API key or an OpenID Connect token; exactly one. What you see
  follows from it alone. Without one every path answers the same 401.
- **Absent and foreign are one answer**: a tenant, log, job or key that is not yours is the same 404, byte for byte, as
  one that does not exist.
- **Pages** (`limit` ≤ 1,000): `next` is the cursor of the following page. It is signed and fits the same operation,
  principal and filters only. `as_of` (the size of a root checkpoint) makes a page repeatable.
- **Acts**: a mutating POST needs an `Idempotency-Key`. The same request again gives the same bytes (with
  `Idempotency-Replayed: true`) for a day; another body under the same key is refused; while the first runs, 409.
  PUT and DELETE are idempotent by what they mean. An activation needs `If-Match`.
- **Answers** have an `ETag` (`If-None-Match` gives 304) and an `X-Request-Id`, which is also in the log.
- **Refusals** are problem details (RFC 9457): [problems](problems.md). 429 and 503 say when to come back.
- A query parameter that an operation does not have is refused: a filter that is misspelled would filter nothing.
- *recorded*: a read by an auditor, a data protection officer or an administrator is itself an event of the ledger,
  durable before the answer.

"""
_PROBLEMS = """# Problems

Every refusal of the [API](api.md) is a problem document (RFC 9457, `application/problem+json`). Types are stable.

"""
_METRICS = """# Metrics

`GET /metrics` (roles operator, auditor and dpo) gives these in Prometheus' text format. Tenants appear under a
pseudonym of the service (`tenant_labels`), at most `tenant_labels_max` of them; the rest are added up as `other`. What
has the label `worker` is what the worker last said of itself (`PUT …/status`); the rest is computed from the ledger.

"""


def pages() -> dict[str, str]:
    """The content of each page by its name."""
    return {
        "api.md": _API + "".join(_operations(orjson.loads(create_api(None).document()))),
        "problems.md": _PROBLEMS + problems_table(),
        "metrics.md": _METRICS + metrics_table(),
    }


def roles_table() -> str:
    """The table of roles in docs/operations.md."""
    rows = ["| role | own tenant | everything |", "|---|---|---|"]
    for role, allowed in PERMISSIONS.items():
        reaches = [
            ", ".join(
                f"`{action.value}`"
                for action, reach in allowed.items()
                if reach is wanted and action is not Permission.SELF
            )
            for wanted in (Reach.OWN, Reach.ALL)
        ]
        rows.append(f"| `{role.value}` | {reaches[0]} | {reaches[1]} |")
    return "\n".join(rows) + "\n"


def _operations(document: dict[str, Any]) -> Iterator[str]:
    for tag in document["tags"]:
        yield f"## {tag['name']}\n\n{tag['description']}\n\n"
        yield "| operation | needs | |\n|---|---|---|\n"
        for path, item in document["paths"].items():
            for method, operation in item.items():
                if tag["name"] in operation["tags"]:
                    yield _row(method, path, operation)
        yield "\n"


def _row(method: str, path: str, operation: dict[str, Any]) -> str:
    action = operation.get("x-kvcustody-action")
    needs = "nothing" if action is None else f"`{action}`"
    notes = []
    query = [f"`{given['name']}`" for given in operation.get("parameters", ()) if given["in"] == "query"]
    if query:
        notes.append("query " + ", ".join(query))
    if operation.get("x-kvcustody-recorded"):
        notes.append("*recorded*")
    says = " ".join(operation["description"].split())
    more = f" ({'; '.join(notes)})" if notes else ""
    return f"| `{method.upper()} {path}` | {needs} | {says}{more} |\n"


def main(arguments: list[str]) -> int:
    """Write the pages, or check them."""
    stale = []
    for name, content in pages().items():
        path = FOLDER / name
        if not path.exists() or path.read_text(encoding="utf-8") != content:
            stale.append(name)
            if "--check" not in arguments:
                path.write_text(content, encoding="utf-8")
    operations = FOLDER / "operations.md"
    text = operations.read_text(encoding="utf-8")
    stale += [operations.name for table in (service_settings_table(), roles_table()) if table not in text]
    print(
        "current" if not stale else f"{'stale' if '--check' in arguments else 'written'}: {', '.join(stale)}"
    )
    return int(bool(stale) and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
