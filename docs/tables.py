"""The tables of the documentation that are made from the code: settings, metrics, codes, roles, commands, the API.

    python docs/tables.py            # writes every table into its page (make tables)
    python docs/tables.py --check    # names the pages whose tables are stale; exit status 1 (make docs, make test)

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`. It is committed, because people read the
pages in the repository, where nothing is built. Keep a table below `LINES_MAX` lines: a longer one hides its page.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kvcustody
from kvcustody.audit.reports.section import sections_table
from kvcustody.audit.verify.ledger.not_evidence import not_evidence_table
from kvcustody.audit.verify.ledger.table_classes import table_classes_table
from kvcustody.console.audit.kinds import kinds_table
from kvcustody.console.command_table import commands_table
from kvcustody.errors import ConfigError
from kvcustody.extensions import POINTS
from kvcustody.governance.api.declarations import every_operation
from kvcustody.governance.api.openapi_document import whole_document
from kvcustody.governance.observability.metrics import metrics_table
from kvcustody.governance.service.access.roles import PERMISSIONS, Permission, Reach
from kvcustody.governance.service.ingest.check_leaves import worker_fields_table
from kvcustody.governance.service.operations.operation import Operation, Operations
from kvcustody.governance.service.problem_details import problems_table
from kvcustody.governance.service.settings import service_settings_table
from kvcustody.governance.settings import settings_table
from kvcustody.plurals import several
from kvcustody.policies.document.problem_codes import CODES

FOLDER = Path(__file__).resolve().parent
LINES_MAX = 400
END = "<!-- end of table -->"
_BEGIN = "<!-- table: "
_TABLE = re.compile(
    rf"^{_BEGIN}(?P<name>.+) -->\n(?:(?!{_BEGIN}).*\n)*?{END}$",  # a table without an end takes no other's
    re.MULTILINE,
)


def fill(page: str) -> str:
    """Write every table of a page anew.

    Args:
        page: The page's Markdown.

    Returns:
        The Markdown with the tables that the code makes now. It equals `page` where no table is stale.

    Raises:
        ConfigError: A table has no end, its name is unknown, or it is longer than `LINES_MAX` lines.
    """
    filled, tables = _TABLE.subn(lambda match: _framed(match["name"]), page)
    begun = len(re.findall(rf"^{_BEGIN}", page, re.MULTILINE))
    if tables != begun:
        raise ConfigError(f"`{begun - tables}` of `{begun}` tables have no line `{END}` below them")
    return filled


def _framed(name: str) -> str:
    text = table(name).strip("\n")
    lines = text.count("\n") + 1
    if lines > LINES_MAX:
        raise ConfigError(f"table `{name}` has `{lines}` lines, more than `{LINES_MAX}`: give it a page of its own")
    return f"{_BEGIN}{name} -->\n\n{text}\n\n{END}"


def table(name: str) -> str:
    """Make the table of a name; raises `ConfigError`, which lists the names, for an unknown one."""
    if name not in TABLES:
        raise ConfigError(f"no table `{name}`: there are {', '.join(sorted(TABLES))}", name=name)
    return TABLES[name]()


def write(folder: Path, *, check: bool = False) -> list[Path]:
    """Write the tables of all pages below `folder`, or only `check` them; returns the pages that were stale."""
    stale = []
    for path in sorted(folder.rglob("*.md")):
        page = path.read_text(encoding="utf-8")
        try:
            filled = fill(page)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        if filled != page:
            stale.append(path)
            if not check:
                path.write_text(filled, encoding="utf-8")
    return stale


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
    return "".join(_operations(every_operation().operations, whole_document()))


def _operations(declared: Operations, document: dict[str, Any]) -> Iterator[str]:
    for tag in document["tags"]:
        yield f"## {tag['name']}\n\n{tag['description']}\n\n"
        yield "| operation | command | needs | |\n|---|---|---|---|\n"
        for item in document["paths"].values():
            for operation in item.values():
                if tag["name"] in operation["tags"]:
                    yield _row(declared.by_name[operation["operationId"]], operation)
        yield "\n"


def _row(declared: Operation, operation: dict[str, Any]) -> str:
    notes = []
    query = [f"`{given['name']}`" for given in operation.get("parameters", ()) if given["in"] == "query"]
    if query:
        notes.append("query " + ", ".join(query))
    if operation.get("x-kvcustody-recorded"):
        notes.append("*recorded*")
    says = " ".join(operation["description"].split())
    more = f" ({'; '.join(notes)})" if notes else ""
    return f"| `{declared.method} {declared.path}` | `{declared.command}` | {declared.needs} | {says}{more} |\n"


def _probed(router: str) -> dict[str, Any]:
    """What `benchmarks/fleet/routers/probe_routers.py` found of a router."""
    path = FOLDER.parent / "benchmarks/results" / f"router-{router}.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _router_carriers() -> str:
    rows = ["| router | headers that arrive | headers that are lost | body fields that arrive | body |"]
    rows.append("|---|---|---|---|---|")
    for name in ("smg", "vllm-router"):
        probed = _probed(name)
        carried = probed["carrier"]
        kept = (["authorization"] if carried["authorization"] else []) + carried["headers"]
        body = "same bytes" if carried["same_bytes"] else "written anew"
        if carried["added"]:
            body += f", `{len(carried['added'])}` fields added"
        if carried["changed"]:
            body += f", changed: {_marked(carried['changed'])}"
        cells = (_marked(kept), _marked(carried["headers_lost"]), _marked(carried["fields"]), body)
        rows.append(f"| {name} {probed['version']} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _router_placement() -> str:
    routers = [_probed(name) for name in ("smg", "vllm-router")]
    columns = []
    for found in routers:
        columns.append((f"{found['router']} {found['version']}, alone", found["placement"]))
        columns += [
            (f"behind the door, `affinity: {affinity}`", placed)
            for affinity, placed in found["placement_behind_the_door"].items()
        ]
    rows = [
        f"| second request | {' | '.join(head for head, _ in columns)} |",
        "|---|" + "---|" * len(columns),
    ]
    for question in routers[0]["placement"]:
        cells = (placed[question] for _, placed in columns)
        text = " | ".join(f"{each['same']} of {each['asked']}" for each in cells)
        rows.append(f"| {question} | {text} |")
    return "\n".join(rows) + "\n"


def _router_habits() -> str:
    rows = ["| router | presentations after a 503 | workers asked to render | copies of a prompt in its memory |"]
    rows.append("|---|---|---|---|")
    for name in ("smg", "vllm-router"):
        found = _probed(name)
        retried, rendered, left = found["retries"], found["renders"], found["residue"]
        rows.append(
            f"| {name} {found['version']} | {retried['presentations']}, at {several(retried['workers'], 'worker')} "
            f"| {rendered['workers']} | {left['at_once']} at once, {left['later']} after {left['later_seconds']} s "
            f"and {left['requests_between']} other requests |"
        )
    return "\n".join(rows) + "\n"


def _dynamo_overlaps() -> str:
    probed = _probed("dynamo")
    rows = [
        f"| Dynamo {probed['version']}, asked for {probed['asked']} chains | with an overlap |",
        "|---|---|",
    ]
    names = {
        "own": "under the namespace in `cache_salt` that told them",
        "foreign": "under another namespace",
        "none": "without a namespace",
        "unknown_field": "with the namespace in a field that it does not know",
    }
    rows += [f"| {text} | {probed['overlaps'][name]} |" for name, text in names.items()]
    return "\n".join(rows) + "\n"


def _door_latency() -> str:
    found = _kept("door-cpu")["sizes"]
    ways = ("envoy and door", "door as proxy")
    rows = [f"| body | requests a second | Envoy alone, ms | {' | '.join(f'{way} adds, ms' for way in ways)} |"]
    rows.append("|---|---|---|---|---|")
    for name, row in found.items():
        alone = f"{row['envoy']['p50_ms']} / {row['envoy']['p99_ms']}"
        added = " | ".join(f"{row[way]['added_p50_ms']} / {row[way]['added_p99_ms']}" for way in ways)
        rows.append(f"| {name} | {row['rate']:g} | {alone} | {added} |")
    return "\n".join(rows) + "\n"


def _two_worlds() -> str:
    rows = ["| router | its policy | pairs | answers that differ | AUC of placement, and its interval |"]
    rows.append("|---|---|---|---|---|")
    for name in ("smg", "vllm-router"):
        found = _kept(f"two-worlds-{name}")
        worlds = {f"`{policy}`, behind the door": one for policy, one in found["behind_the_door"].items()}
        for policy, one in (worlds | {"control: `cache_aware`, alone": found["control_alone"]}).items():
            rows.append(
                f"| {name} {found['version']} | {policy} | {one['pairs']:,} | {one['answers_that_differ']:,} "
                f"| {one['auc']:.3f} ({one['low']:.3f} to {one['high']:.3f}) |"
            )
    return "\n".join(rows) + "\n"


def _placement_groups() -> str:
    rows = ["| router | workers a group has, of 4 | own prompt | segment across subjects | tenants that meet |"]
    rows.append("|---|---|---|---|---|")
    for name in ("smg", "vllm-router"):
        for one in _kept(f"placement-groups-{name}")["rows"]:
            size = one["group_workers"]
            cells = (f"{one[asked]} of {one['pairs']}" for asked in ("own prompt", "segment across subjects"))
            group = f"{size}, no groups" if size == 4 else str(size)
            rows.append(f"| {name} | {group} | {' | '.join(cells)} | {one['tenants that meet']:.2f} |")
    return "\n".join(rows) + "\n"


def _demanded_placement() -> str:
    rows = [
        "| router | rules | requests | at a worker that may not serve them | that no group may serve, at a worker |",
        "|---|---|---|---|---|",
    ]
    for name in ("none", "smg", "vllm-router"):
        found = _kept(f"demanded-placement-{name}")
        for one in (found["ruled"], *found["controls"]):
            groups = "" if one["groups"] else ", one router over all workers"
            rules = "as above" if one["rules"] else f"control: none{groups}"
            nowhere = one["that no group may serve"]
            seen = f"{nowhere - one['of them refused, and seen by no worker']:,} of {nowhere:,}"
            called = "none, the door's proxy" if name == "none" else name
            wrong = one["at a worker that may not serve them"]
            rows.append(f"| {called} | {rules} | {one['requests']:,} | {wrong:,} | {seen} |")
    return "\n".join(rows) + "\n"


def _wrong_route() -> str:
    rows = [
        "| router | who knows the group | requests | refused | on record | requests opened | blocks handed out |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in ("smg", "vllm-router"):
        for one in _kept(f"wrong-route-{name}")["rows"]:
            refused = one["requests"] - one["statuses"].get("200", 0)
            reasons = (
                f"`{reason}` {count:,}" for reason, count in one["refusals_on_record"].items() if reason != "missing"
            )
            cells = (one["requests_opened"], one["blocks_handed_out"])
            told = " | ".join(f"{cell:,}" for cell in cells)
            recorded = ", ".join(reasons) or "none"
            rows.append(f"| {name} | {one['defence']} | {one['requests']:,} | {refused:,} | {recorded} | {told} |")
    return "\n".join(rows) + "\n"


def _part_faults() -> str:
    rows = [
        "| part | fault | seconds | requests failed | longest without an answer (s) | erasure acknowledged after (s) | "
        "reuse again after the end (s) | last reuse of what was erased (s) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in _kept("fleet-part-faults-60s-cpu")["faults"]:
        times = (
            one["longest_without_answer_seconds"],
            one["erasure_acknowledged_after_seconds"],
            one["recovered_after_seconds"],
            one["last_reuse_after_erasure_seconds"],
        )
        told = " | ".join(f"{time:.1f}" for time in times)
        failed = f"{one['failed']:,} of {one['requests']:,}"
        rows.append(f"| {one['part']} | {one['fault']} | {one['seconds']:.0f} | {failed} | {told} |")
    return "\n".join(rows) + "\n"


def _dynamo_groups() -> str:
    found = _kept("dynamo-groups")
    rows = [f"| filter, of {found['asked']:,} requests each | chosen workers, of 6 |", "|---|---|"]
    for name, counts in found["chosen"].items():
        workers = ", ".join(worker for worker in counts if not worker.startswith("refused"))
        rows.append(f"| {f'`{name}`' if ':' in name else name} | {workers or 'none: every request is refused'} |")
    return "\n".join(rows) + "\n"


def _hits_through_doors() -> str:
    rows = ["| trace | tenants and doors | tokens found | of the oracle's | busiest worker over the mean |"]
    rows.append("|---|---|---|---|---|")
    for trace, found in _kept("hits-through-doors-smg")["traces"].items():
        for setup, one in found["setups"].items():
            share = f"{100 * one['found_share']:.1f} %"
            rows.append(f"| {trace} | {setup} | {share} | {one['to_oracle']:.3f} | {one['imbalance']:.2f} |")
    return "\n".join(rows) + "\n"


def _isolation_cost() -> str:
    rows = ["| trace | row | tokens found | of the oracle's | first token, p50 / p99 | imbalance |"]
    rows.append("|---|---|---|---|---|---|")
    for trace, found in _kept("isolation-cost")["traces"].items():
        for one in found:
            row = f"{one['part']}: {one['name']}"
            wait = f"{one['ttft_p50_ms'] / 1000:.2f} / {one['ttft_p99_ms'] / 1000:.1f} s"
            share = f"{100 * one['found_share']:.1f} %"
            rows.append(f"| {trace} | {row} | {share} | {one['to_oracle']:.3f} | {wait} | {one['imbalance']:.2f} |")
    return "\n".join(rows) + "\n"


def _fleet_routers() -> str:
    rows = ["| row | router | tokens found | of the oracle's | first token, p50 / p99 | imbalance |"]
    rows.append("|---|---|---|---|---|---|")
    kept = {name: next(iter(_kept(f"fleet-{name}")["traces"].values())) for name in ("model", "smg", "dynamo")}
    for together in zip(*kept.values(), strict=True):
        for router, one in zip(kept, together, strict=True):
            wait = f"{one['ttft_p50_ms'] / 1000:.2f} / {one['ttft_p99_ms'] / 1000:.1f} s"
            cells = (f"{one['part']}: {one['name']}", router, f"{100 * one['found_share']:.1f} %")
            rows.append(f"| {' | '.join(cells)} | {one['to_oracle']:.3f} | {wait} | {one['imbalance']:.2f} |")
    return "\n".join(rows) + "\n"


def _windowed_affinity() -> str:
    every = [_kept(f"windowed-affinity-{name}") for name in ("mooncake_conv_dev40", "mooncake_synthetic_upstream")]
    windows = list(every[0]["by window in minutes"])
    rows = [
        f"| trace | {' | '.join(f'{window} min' for window in windows)} |",
        "|---|" + "---|" * len(windows),
    ]
    for found in every:
        cells = (f"{found['by window in minutes'][window]['kept']:.3f}" for window in windows)
        rows.append(f"| {found['trace']} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _erasures_and_hits() -> str:
    found = _kept("erasures-and-hits")["found"]
    rates = list(next(iter(next(iter(found.values())).values())))
    rows = [f"| trace | the name that ends | {' | '.join(f'{rate} a day' for rate in rates)} |"]
    rows.append("|---|---|" + "---|" * len(rates))
    for trace, namings in found.items():
        for naming, by_rate in namings.items():
            cells = " | ".join(f"{by_rate[rate]['to_none']:.3f}" for rate in rates)
            rows.append(f"| {trace.removesuffix('.jsonl.gz')} | of the {naming} | {cells} |")
    return "\n".join(rows) + "\n"


def _remote_stores() -> str:
    names = {"s3": "S3 (SeaweedFS)", "valkey": "Valkey", "mooncake": "Mooncake"}
    rows = [
        "| store | object | store ÷ library | goal | load ÷ library | goal |",
        "|---|---|---|---|---|---|",
    ]
    kept = _kept("remote-stores-cpu")
    for kind, name in names.items():
        for point in kept[kind]:
            ratios = (f"{point[side]:.2f} | {point['goal'][side]:.2f}" for side in ("store", "load"))
            rows.append(f"| {name} | {point['mib']} MiB | {' | '.join(ratios)} |")
    return "\n".join(rows) + "\n"


def _idle_workers() -> str:
    rows = ["| workers | cores, PostgreSQL's included | `/health/live`, p99 | all registered at once, in | refused |"]
    rows.append("|---|---|---|---|---|")
    for workers, measured in _kept("idle-workers-cpu")["workers"].items():
        idle, herd = measured["idle"], measured["herd_again"]
        cells = (f"{idle['cores']:.2f}", f"{idle['live_ms_p99']:.0f} ms", f"{herd['seconds']:.0f} s")
        refused = idle["refusals"] + herd["refusals"]
        rows.append(f"| {int(workers):,} | {' | '.join(cells)} | {refused} |")
    return "\n".join(rows) + "\n"


def _kept(name: str) -> Any:
    """A result that a benchmark kept."""
    return json.loads((FOLDER.parent / f"benchmarks/results/{name}.json").read_text())


def _marked(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


TABLES: dict[str, Callable[[], str]] = {
    "settings": settings_table,
    "service-settings": service_settings_table,
    "metrics": metrics_table,
    "problems": problems_table,
    "worker-fields": worker_fields_table,
    "roles": _roles,
    "api": _api,
    "commands": commands_table,
    "extensions": _extensions,
    "public-names": _public_names,
    "not-evidence": not_evidence_table,
    "table-classes": table_classes_table,
    "kinds": kinds_table,
    "router-carriers": _router_carriers,
    "router-placement": _router_placement,
    "router-habits": _router_habits,
    "router-overlaps": _dynamo_overlaps,
    "door-latency": _door_latency,
    "two-worlds": _two_worlds,
    "erasures-and-hits": _erasures_and_hits,
    "placement-groups": _placement_groups,
    "demanded-placement": _demanded_placement,
    "wrong-route": _wrong_route,
    "part-faults": _part_faults,
    "dynamo-groups": _dynamo_groups,
    "windowed-affinity": _windowed_affinity,
    "hits-through-doors": _hits_through_doors,
    "isolation-cost": _isolation_cost,
    "fleet-routers": _fleet_routers,
    "remote-stores": _remote_stores,
    "idle-workers": _idle_workers,
    "report-sections": sections_table,
    **{f"policy-codes {hundred}": _codes(f"KVP{hundred}") for hundred in range(1, 8)},
}


def main() -> int:
    """Write or check the tables of the documentation."""
    parser = ArgumentParser(description="Write the tables that are made from the code into the pages of docs/.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 and name the pages whose tables are stale"
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, default=FOLDER, help="the pages (default: the folder of this script)"
    )
    options = parser.parse_args()
    try:
        stale = write(options.folder, check=options.check)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for path in stale:
        print(f"{path}: {'its tables are stale; write them with `make tables`' if options.check else 'written'}")
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
