"""`kvcustody known-bugs`: public bugs of cache layers, looked for in what is installed, others' products and ours."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvcustody.errors import ConfigError
from kvcustody.files import READABLE, write_file
from kvcustody.policies.document.problems import did_you_mean
from kvcustody.testkit.conform.findings import FOUND, NOT_RUN, CaseFinding
from kvcustody.testkit.conform.installed_parts import installed_parts
from kvcustody.testkit.conform.public_cases import CASE_OF, TARGET_OF, TARGETS
from kvcustody.testkit.conform.run_scripts import run_target, script_of, this_python

EPILOG = """
Examples:

    kvcustody known-bugs --list

    kvcustody known-bugs --target kvcustody

    kvcustody known-bugs --target lmcache-aesgcm --python .venv-lmcache/bin/python --html lmcache.html

    kvcustody known-bugs --target vllm-example --script > ask_vllm.py

    kvcustody known-bugs --parts --python .venv-vllm/bin/python

Exit code 0: every case holds. 1: one was found. 3: one could not run.
"""


def known_bugs(
    *,
    target: Annotated[str, typer.Option(help="What to look into; `--list` names them.")] = "",
    case: Annotated[list[str] | None, typer.Option(help="Only this one; may be repeated.")] = None,
    python: Annotated[
        str, typer.Option(metavar="PYTHON", help="The interpreter of the environment that has the product.")
    ] = "",
    listing: Annotated[bool, typer.Option("--list", help="Name the targets and their cases.")] = False,
    parts: Annotated[
        bool,
        typer.Option("--parts", help="Name the connectors, tiers and stores of that environment, tried or untested."),
    ] = False,
    script: Annotated[
        bool,
        typer.Option("--script", help="Print the target's script, which runs by itself, and do nothing."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    html_path: Annotated[Path | None, typer.Option("--html", help="Write the report as a page.")] = None,
    sarif_path: Annotated[Path | None, typer.Option("--sarif", help="Write what was found as SARIF.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the report as JSON.")] = None,
) -> None:
    """Look for public bugs of cache layers in an installed product, ours or another's, and say what was seen."""
    if parts:
        _parts(python or this_python(), as_json=as_json)
        return
    if listing or not target:
        _list(as_json=as_json)
        return
    if target not in TARGET_OF:
        hint = did_you_mean(target, TARGET_OF) or "`--list` names them"
        raise ConfigError(f"there is no target `{target}`; {hint}", target=target)
    chosen = TARGET_OF[target]
    for name in case or ():
        if name not in chosen.cases:
            raise ConfigError(f"`{target}` has no case `{name}`; it has {', '.join(chosen.cases)}", case=name)
    if script:
        print(script_of(chosen).read_text(), end="")
        return
    report = run_target(chosen, python or this_python(), case or (), _progress)
    for path, text in (
        (out, report.to_json()),
        (sarif_path, report.to_sarif()),
        (html_path, report.to_html()),
    ):
        if path is not None:
            write_file(path, text.encode(), mode=READABLE)
    if as_json:
        print(report.to_json(), end="")
    else:
        print(f"{chosen.says} {report.version}".rstrip())
        for one in report.findings:
            print(f"  {one.verdict:8} {CASE_OF[one.case].holds}\n           {one.evidence}")
    verdicts = {one.verdict for one in report.findings}
    raise typer.Exit(3 if NOT_RUN in verdicts else 1 if FOUND in verdicts else 0)


def _list(*, as_json: bool) -> None:
    if as_json:
        print(json.dumps([{"target": one.name, "says": one.says, "cases": list(one.cases)} for one in TARGETS]))
        return
    for one in TARGETS:
        print(f"{one.name}: {one.says}")
        for name in one.cases:
            print(f"  {name}: {CASE_OF[name].holds}")


def _parts(python: str, *, as_json: bool) -> None:
    """Every registered part there, and what tried it."""
    found = installed_parts(python)
    if as_json:
        print(json.dumps([one._asdict() for one in found]))
        return
    for one in found:
        print(f"{one.registry:18} {one.name:31} {one.problem or one.tried or 'untested'}")
    untested = sum(not one.tried and not one.problem for one in found)
    print(f"{len(found)} parts, {untested} of them untested" if found else "no engine is installed there")


def _progress(finding: CaseFinding) -> None:
    print(f"{finding.verdict:8} {finding.case} ({finding.seconds:.1f} s)", file=sys.stderr, flush=True)
