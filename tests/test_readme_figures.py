"""README.md's table of what is shown: its figures are those of the kept results and of the kit; its commands exist.

What a busy machine changes is compared with the file that was kept, what can be counted at once is counted.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

import kvcustody
from kvcustody.console.main import COMMANDS
from kvcustody.testkit.conformance.mutants import native, reference

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README = (ROOT / "README.md").read_text(encoding="utf-8")
TABLE = README.split("## What is shown", 1)[1].split("\n\n", 2)[1]


def rows() -> list[tuple[str, str, str]]:
    """Claim, figure and command of each row."""
    lines = [line for line in TABLE.splitlines() if line.startswith("| ")][1:]
    return [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in lines]  # type: ignore[misc]


def row(named: str) -> tuple[str, str]:
    """Claim and figure of the one row whose claim begins so."""
    ((claim, figure, _),) = [each for each in rows() if each[0].startswith(named)]
    return claim, figure


def kept(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def unknown(command: str) -> str | None:
    """What of a command is not there, if anything."""
    words = shlex.split(command)
    if words[0] == "make":
        targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        return None if words[1] in targets else words[1]
    if words[0] == "kvcustody":
        others = {each.name for each in entry_points(group="kvcustody.commands")}
        return None if words[1] in {*COMMANDS, *others} else words[1]
    paths = [word for word in words if "/" in word and not word.startswith(".venv")]
    return next((path for path in paths if not (ROOT / path).exists()), None)


def test_every_row_has_a_command_that_is_there() -> None:
    found = rows()
    assert len(found) > 10 and all(len(each) == 3 for each in found)
    for _, _, command in found:
        (named,) = re.findall(r"^`([^`]+)`", command)
        assert unknown(named) is None, command
    assert [unknown(each) for each in ("make sweep", "kvcustody nothing", "benchmarks/gone.py")] == [
        "sweep",
        "nothing",
        "benchmarks/gone.py",
    ], "control"


def test_vllm_is_compared_as_the_kept_file_says() -> None:
    result = kept("block-manager-cpu")
    _, figure = row("A governed request against")
    for tokens, name in ((1024, "1K"), (8192, "8K"), (32768, "32K")):
        ratios = [one["ratios"]["governed"] for one in result["requests"] if one["tokens"] == tokens]
        assert len(ratios) == 6
        alone, with_leaves = ([one["cpu"]["value"] for one in ratios], [one["with_leaves"] for one in ratios])
        said = rf"{_span(alone)} at {name}.*: .*{_span(with_leaves)} at {name}"
        assert re.search(said, figure), (said, figure)
    leaves = [
        one["peers"]["governed"]["leaves"]["us_per_request"] for one in result["requests"] if one["tokens"] == 1024
    ]
    assert f"{min(leaves):.0f}–{max(leaves):.0f} µs a request at 1K" in figure
    step = result["decode"]["ratios"]["governed"]["cpu"]["value"]
    assert row("Extending 256")[1].startswith(f"{step:.2f} ")


def _span(values: list[float]) -> str:
    return f"{min(values):.2f}–{max(values):.2f}"


def test_the_goals_stand_where_the_page_says() -> None:
    result = kept("block-manager-cpu")
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    met = [one for one in result["requests"] if one["ratios"]["governed"]["met"]]
    missed = [one for one in result["requests"] if not one["ratios"]["governed"]["met"]]
    counts = f"{len(met)} of the {len(met) + len(missed)} request points meet their goal"
    assert counts in page.replace("\n", " ")
    assert result["decode"]["ratios"]["governed"]["met"], "which the page says"
    told = re.search(r"^Missed: (.*?)\.$", page, re.MULTILINE | re.DOTALL)
    assert told is not None
    assert [tuple(each) for each in re.findall(r"([\d,]+)/(\d+)/(\w+) \(([\d.]+)\)", told[1])] == [
        (
            f"{one['tokens']:,}",
            str(one["hit_percent"]),
            one["pool"],
            f"{one['ratios']['governed']['cpu']['value']:.2f}",
        )
        for one in missed
    ]


def test_a_decision_takes_what_the_kept_file_says() -> None:
    assert row("A policy decision")[1].startswith(f"{kept('scale-cpu')['results']['decision']['own_ns'] / 1000:.2f} ")


def test_no_call_was_refused_under_any_flood() -> None:
    floods = kept("flood-cpu")["floods"]
    figures = [one["service"] for name, one in floods.items() if name != "nobody"]
    assert len(figures) == 5
    ((refused, requests),) = {(one["not_200"], one["requests"]) for one in figures}
    slowest = [one["p99_ms"] for one in figures]
    said = f"{refused} of {requests} under each; p99 {min(slowest):.0f}–{max(slowest):.0f} ms"
    assert row("Valid calls of the service")[1] == said


def test_every_historic_bug_is_counted() -> None:
    counts = [len(reference.MUTANTS), len(native.MUTANTS)]
    assert re.findall(r"(\d+) of (\d+)", row("Historic bugs")[1]) == [(str(one), str(one)) for one in counts]


@pytest.mark.system("the README's program does not run as it stands")
def test_its_program_runs_as_it_stands(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (program,) = re.findall(r"```python\n(.+?)```", README, re.DOTALL)
    (output,) = re.findall(r"```\n(ada of acme.+?)```", README, re.DOTALL)
    console = Path(sys.executable).parent / "kvcustody"
    made = ["policy", "init", "policy.yaml", "--from", "regulated-saas", "--name", "mine"]
    subprocess.run([console, *made], cwd=tmp_path, check=True, capture_output=True)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [line for line in done.stdout.splitlines() if line.endswith("tokens found")]
    assert found == output.splitlines()


def test_its_program_uses_public_names_alone() -> None:
    (program,) = re.findall(r"```python\n(.+?)```", README, re.DOTALL)
    named = [node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.ImportFrom)]
    assert named and all(node.module == "kvcustody" for node in named)
    assert {alias.name for node in named for alias in node.names} <= set(kvcustody.__all__)


def figures(cell: str) -> set[str]:
    """The numbers of a cell, without links."""
    return set(re.findall(r"\d[\d.,⁰-⁹–]*", re.sub(r"\]\([^)]*\)", "", cell)))


def other_figures(evidence: str) -> list[str]:
    """Rows of the page of evidence whose command is a row's of README, with a number that README does not give."""
    shown: dict[str, set[str]] = {}
    for claim, figure, command in rows():
        shown.setdefault(re.findall(r"`([^`]+)`", command)[0], set()).update(figures(claim + figure))
    lines = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in evidence.splitlines() if line[:2] == "| "
    ]
    asked = [line for line in lines if len(line) > 3 and line[2].strip("`") in shown]
    return [line[0] for line in asked if not figures(line[1]) <= shown[line[2].strip("`")]]


def test_the_page_of_evidence_gives_the_same_figures() -> None:
    page = (ROOT / "docs" / "reference" / "evidence.md").read_text(encoding="utf-8")
    assert other_figures(page) == []
    assert other_figures(page.replace("p99 5–17 ms", "p99 5–18 ms")) != [], "control"
