"""`kvcustody known-bugs`: looks for public bugs of cache layers in installed products, others' and ours."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import typer

from kvcustody.errors import ConfigError
from kvcustody.files import READABLE, write_file
from kvcustody.policies.document.problems import did_you_mean
from kvcustody.testkit.conform.findings import FOUND, HOLDS, NOT_RUN, CaseFinding, ConformReport
from kvcustody.testkit.conform.public_cases import CASE_OF, TARGET_OF, TARGETS, Target

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
    """Print every registered part in that environment, and what tried it."""
    parts = installed_parts(python)
    if as_json:
        print(json.dumps([one._asdict() for one in parts]))
        return
    for one in parts:
        print(f"{one.registry:18} {one.name:31} {one.problem or one.tried or 'untested'}")
    untested = sum(not one.tried and not one.problem for one in parts)
    print(f"{len(parts)} parts, {untested} of them untested" if parts else "no engine is installed there")


def _progress(finding: CaseFinding) -> None:
    print(f"{finding.verdict:8} {finding.case} ({finding.seconds:.1f} s)", file=sys.stderr, flush=True)


# The connectors, tiers and stores of an installed engine, and which of them were tried.
#
# A part counts as tried where a target of `kvcustody known-bugs` or a stored run of the conformance kit covers it;
# every other one is listed as untested.

SCRIPT: Final = Path(__file__).resolve().parent / "scripts" / "engines" / "registries.py"
_SCRIPT_SECONDS: Final = 300.0
# By registry and name: what tried it.
TRIED: Final = {
    ("vllm-connector", "ExampleConnector"): "known-bugs --target vllm-example",
    ("vllm-connector", "NixlConnector"): "known-bugs --target vllm-transfer",
    ("vllm-connector", "LMCacheMPConnector"): "the conformance kit, with a record",
    ("vllm-connector", "OffloadingConnector"): "known-bugs --target vllm-tiers",
    ("vllm-offload", "CPUOffloadingSpec"): "known-bugs --target vllm-tiers",
    ("vllm-offload", "TieringOffloadingSpec"): "known-bugs --target vllm-tiers",
    ("vllm-tier", "fs"): "known-bugs --target vllm-tiers",
    (
        "vllm-tier",
        "kvcr",
    ): "known-bugs --target kvcr",  # vLLM's part gives it memory and keys, and changes neither
    ("sglang-store", "file"): "known-bugs --target sglang-hicache",
    ("vllm-connector", "LMCacheConnectorV1"): "known-bugs --target lmcache-in-process",
    ("lmcache-adapter", "fs_l2_adapter"): "known-bugs --target lmcache-files",
    ("lmcache-serde", "aesgcm"): "known-bugs --target lmcache-aesgcm",
}


class InstalledPart(NamedTuple):
    """One name in a registry. `tried`: what tried it, or empty. `problem`: why the registry could not be read."""

    registry: str
    name: str
    tried: str
    problem: str = ""


def installed_parts(python: str) -> list[InstalledPart]:
    """Return every registered part of the packages of this interpreter.

    Raises:
        ConfigError: the interpreter does not run.
    """
    try:
        done = subprocess.run(  # noqa: S603 - the interpreter that was named
            [python, str(SCRIPT)], capture_output=True, text=True, timeout=_SCRIPT_SECONDS, check=True
        )
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise ConfigError(f"{python} lists nothing: {type(error).__name__}", python=python) from None
    return parts_of(found)


def parts_of(found: dict[str, list[str] | str]) -> list[InstalledPart]:
    """Return the script's findings as parts, with what tried each."""
    parts = []
    for registry, names in sorted(found.items()):
        if isinstance(names, str):
            parts.append(InstalledPart(registry, "", "", names))
            continue
        parts += [InstalledPart(registry, name, TRIED.get((registry, name), "")) for name in names]
    return parts


# Runs a target's scripts, each in its own process of the environment that has the product.

SCRIPTS = Path(__file__).resolve().parent / "scripts"


def script_of(target: Target) -> Path:
    """Return the script for all cases of a target."""
    name = target.script or target.name.replace("-", "_")
    [found] = SCRIPTS.glob(f"*/{name}.py")
    return found


def run_target(
    target: Target,
    python: str,
    cases: Sequence[str] = (),
    progress: Callable[[CaseFinding], None] = lambda _: None,
) -> ConformReport:
    """Return the findings for every case of a target, or for these cases; a case that cannot run says why."""
    if "/" in python:
        python = str(Path(python).absolute())  # a script runs in its own folder
    version, why = _version(target, python)
    findings = []
    for case in cases or target.cases:
        finding = CaseFinding(case, NOT_RUN, why, script_of(target).name, 0.0) if why else _run(target, python, case)
        progress(finding)
        findings.append(finding)
    return ConformReport(target, version, tuple(findings))


def _version(target: Target, python: str) -> tuple[str, str]:
    """Return the installed version, or the reason why there is none."""
    ask = (
        "import importlib.util, importlib.metadata as m, sys\n"
        "assert importlib.util.find_spec(sys.argv[1]) is not None, 'not installed'\n"
        "print(m.version(sys.argv[2]))"
    )
    try:
        done = _ask(python, "-c", ask, target.needs, target.product)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"{python} does not run: {type(error).__name__}"
    if done.returncode:
        return "", f"`{target.product}` is not installed where this ran; name its environment with --python"
    return done.stdout.split()[-1], ""


def _run(target: Target, python: str, case: str) -> CaseFinding:
    script, began = script_of(target), time.monotonic()
    try:
        done = _ask(python, str(script), case, *target.words)
        said = json.loads(done.stdout.strip().splitlines()[-1])
        verdict, evidence = FOUND if said["found"] else HOLDS, str(said["evidence"])
    except (OSError, subprocess.TimeoutExpired) as error:
        verdict, evidence = NOT_RUN, type(error).__name__
    except (ValueError, IndexError, KeyError, TypeError):
        verdict, evidence = NOT_RUN, (done.stderr.strip().splitlines() or ["the script said nothing"])[-1]
    return CaseFinding(case, verdict, evidence, script.name, time.monotonic() - began)


def _ask(python: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the named interpreter in the folder of scripts."""
    return subprocess.run(  # noqa: S603
        [python, *words], capture_output=True, text=True, timeout=_SCRIPT_SECONDS, cwd=SCRIPTS.parent, check=False
    )


def this_python() -> str:
    """Return the running interpreter."""
    return sys.executable
