"""The tables of docs/ that say what the code says: settings, metrics, codes, roles, the API, extensions.

A page holds a line `<!-- table: NAME -->`, which `render` replaces when the site is built (`make docs`). To read one
without building: `python -m kvcustody.console.documentation metrics`.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import orjson

import kvcustody
from kvcustody.audit.verify.not_evidence import not_evidence_table
from kvcustody.console.command_table import commands_table
from kvcustody.errors import ConfigError
from kvcustody.extensions import POINTS
from kvcustody.governance.api.app import create_api
from kvcustody.governance.api.http.operation import Operations
from kvcustody.governance.observability.metrics import metrics_table
from kvcustody.governance.service.access.roles import PERMISSIONS, Permission, Reach
from kvcustody.governance.service.problem_details import problems_table
from kvcustody.governance.service.settings import service_settings_table
from kvcustody.governance.settings import settings_table
from kvcustody.policies.document.problem_codes import CODES

_MARKER = re.compile(r"^<!-- table: ([a-z0-9 -]+) -->$", re.MULTILINE)


def render(page: str) -> str:
    """A page with its tables in place; raises `ConfigError` for a table that does not exist."""
    return _MARKER.sub(lambda found: table(found[1]).rstrip("\n"), page)


def table(name: str) -> str:
    """The table of a name; raises `ConfigError` that lists the names."""
    if name not in TABLES:
        raise ConfigError(f"no table `{name}`: there are {', '.join(sorted(TABLES))}", name=name)
    return TABLES[name]()


def _codes(group: str) -> Callable[[], str]:
    def made() -> str:
        rows = ["| code | meaning | what to do |", "|---|---|---|"]
        rows += [
            f'| <a id="{code.lower()}"></a>{code} | {entry.title} | {entry.advice} |'
            for code, entry in CODES.items()
            if code.startswith(group)
        ]
        return "\n".join(rows) + "\n"

    return made


def _extensions() -> str:
    rows = ["| group | named by | the factory is given | it gives |", "|---|---|---|---|"]
    rows += [
        f"| `{point.group}` | {point.named_by} | {point.given} | `{point.contract.removeprefix('kvcustody.')}` |"
        for point in POINTS
    ]
    return "\n".join(rows) + "\n"


def _public_names() -> str:
    rows = ["| name | |", "|---|---|"]
    for name in kvcustody.__all__:
        first = (inspect.getdoc(getattr(kvcustody, name)) or "").split("\n\n")[0]
        if name != "__version__":
            rows.append(f"| `{name}` | {' '.join(first.split())} |")
    return "\n".join(rows) + "\n"


def _roles() -> str:
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


def _api() -> str:
    api = create_api(None)
    return "".join(_operations(api.operations, orjson.loads(api.document())))


def _operations(declared: Operations, document: dict[str, Any]) -> Iterator[str]:
    for tag in document["tags"]:
        yield f"## {tag['name']}\n\n{tag['description']}\n\n"
        yield "| operation | needs | |\n|---|---|---|\n"
        for path, item in document["paths"].items():
            for method, operation in item.items():
                if tag["name"] in operation["tags"]:
                    needs = declared.by_name[operation["operationId"]].needs
                    yield _row(method, path, needs, operation)
        yield "\n"


def _row(method: str, path: str, needs: str, operation: dict[str, Any]) -> str:
    notes = []
    query = [f"`{given['name']}`" for given in operation.get("parameters", ()) if given["in"] == "query"]
    if query:
        notes.append("query " + ", ".join(query))
    if operation.get("x-kvcustody-recorded"):
        notes.append("*recorded*")
    says = " ".join(operation["description"].split())
    more = f" ({'; '.join(notes)})" if notes else ""
    return f"| `{method.upper()} {path}` | {needs} | {says}{more} |\n"


TABLES: dict[str, Callable[[], str]] = {
    "settings": settings_table,
    "service-settings": service_settings_table,
    "metrics": metrics_table,
    "problems": problems_table,
    "roles": _roles,
    "api": _api,
    "commands": commands_table,
    "extensions": _extensions,
    "public-names": _public_names,
    "not-evidence": not_evidence_table,
    **{f"policy-codes {hundred}": _codes(f"KVP{hundred}") for hundred in range(1, 8)},
}


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(TABLES):
        print(table(name))
