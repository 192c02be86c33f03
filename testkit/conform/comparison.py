"""The page that compares cache layers, from the records of `kvcustody known-bugs`.

python -m kvcustody.testkit.conform.comparison RECORDS KIT FILE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from kvcustody.files import READABLE, write_file
from kvcustody.testkit.conform.findings import FOUND, HOLDS
from kvcustody.testkit.conform.public_cases import CASES, LEFT_OUT, TARGETS

_HEAD = """# Other systems

Public bugs of cache layers, looked for in what pip installs, by a script each that anybody can run:
`kvcustody known-bugs --list` names them, `kvcustody known-bugs --target NAME --script` prints one. Everything here
was said in public before, at the places that a report names. `benchmarks/conform.sh` asks them
all again, keeps the records in `benchmarks/results/conform/` and makes this page of them.

*found*: the product does what it ought not to. *holds*: it does not. Who is not named was not asked: the case is not of
that part.

"""

_KIT = """## Our engines, by the conformance kit

What every engine under custody has to pass ([engine port](../../build/engine-port.md)). What is left out says why: the
engine has no such part, or the kit does not reach it.

"""

_LEFT_OUT = """## What is public and is no case

Nothing here says that it is not so: it could not be asked of what pip installs on a machine without a GPU, or is over.
"""


def _short(source: str) -> str:
    """Return `vllm-project/vllm#1`, or the end of an address without a number."""
    parts = source.removeprefix("https://github.com/").split("/")
    return f"{parts[0]}/{parts[1]}#{parts[-1]}" if parts[-1].isdigit() else parts[-1]


def page(records: Path, kit: Path) -> str:
    """Return Markdown for every record in one folder, and every conformance run in another.

    Raises `OSError` or `ValueError` where one cannot be read.
    """
    reports: dict[str, dict[str, Any]] = {}
    for path in sorted(records.rglob("*.json")):
        body = json.loads(path.read_text())
        reports[body["target"]] = body
    shown = [target for target in TARGETS if target.name in reports]
    verdicts = {(name, case["case"]): case["verdict"] for name, body in reports.items() for case in body["cases"]}

    def asked(case: str, verdict: str, *, ours: bool) -> str:
        """Return the targets with this answer."""
        chosen = [one for one in shown if one.name.startswith("kvcustody") is ours]
        return "; ".join(one.says for one in chosen if verdicts.get((one.name, case)) == verdict)

    lines = ["| what ought to hold | found | holds | ours: holds | ours: found |", "|---|---|---|---|---|"]
    for case in CASES:
        cells = [asked(case.name, verdict, ours=False) for verdict in (FOUND, HOLDS)]
        cells += [asked(case.name, verdict, ours=True) for verdict in (HOLDS, FOUND)]
        lines.append(f"| {case.holds} | " + " | ".join(cells) + " |")
    lines += ["", "## What was seen", ""]
    for target in shown:
        body = reports[target.name]
        lines += [f"**{target.says}** (`{target.name}`, {body['product']} {body['version']})", ""]
        lines += [f"- `{case['case']}`, {case['verdict']}: {case['evidence']}" for case in body["cases"]]
        lines.append("")
    lines += [_LEFT_OUT, "| public | what it says | why it is no case |", "|---|---|---|"]
    lines += [f"| [{_short(one.source)}]({one.source}) | {one.says} | {one.reason} |" for one in LEFT_OUT]
    return "\n".join([_HEAD + "\n".join(lines).rstrip(), "", _kit_table(kit)])


def _kit_table(runs: Path) -> str:
    lines = []
    for path in sorted(runs.glob("*.json")):
        body = json.loads(path.read_text())
        reasons: dict[str, list[str]] = {}
        for case in body["cases"]:
            if case["verdict"] != "pass":
                reasons.setdefault(case["reason"], []).append(f"`{case['case']}`")
        why = "; ".join(f"{reason} ({', '.join(names)})" for reason, names in reasons.items())
        lines.append(f"| {body['engine']} | {body['counts']['pass']} of {len(body['cases'])} | {why} |")
    return _KIT + "\n".join(["| engine | passed | left out |", "|---|---|---|", *lines]) + "\n"


if __name__ == "__main__":
    write_file(Path(sys.argv[3]), page(Path(sys.argv[1]), Path(sys.argv[2])).encode(), mode=READABLE)
