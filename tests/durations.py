"""Which tests take the time, and what each buys: writes `tests/DURATIONS.md` (`make durations`).

    python tests/durations.py REPORT.xml    # a JUnit report of pytest (--junitxml)

What a test buys is the first sentence of its docstring, else its name. What a test of whole systems buys is the fault
in its mark, `@pytest.mark.system("a killed service loses a batch")`: one that `make test` does not find.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

TESTS = Path(__file__).resolve().parent
PAGE = TESTS / "DURATIONS.md"
SLOWEST = 50


class Item(NamedTuple):
    """A test with its parameters, and how long it took with its set-up."""

    place: str  # its file below tests/, and its name
    seconds: float


def slowest_items(report: Path) -> list[Item]:
    """Every item of a JUnit report, the slowest first."""
    items = []
    for case in ElementTree.parse(report).iter("testcase"):
        folders = case.attrib["classname"].removeprefix("tests.").split(".")
        classes = [part for part in folders if part[:1].isupper()]
        file = "/".join(part for part in folders if part not in classes) + ".py"
        name = "::".join([*classes, case.attrib["name"]])
        items.append(Item(f"{file}::{name}", float(case.attrib["time"])))
    return sorted(items, key=lambda item: -item.seconds)


def what_it_buys(place: str) -> str:
    """The first sentence of a test's docstring, else its name."""
    file, *_, name = place.split("::")
    name = name.partition("[")[0]
    for node in ast.walk(ast.parse((TESTS / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name == name and ast.get_docstring(node):
            return " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
    return name.removeprefix("test_").replace("_", " ")


def named_faults() -> Iterator[tuple[str, str]]:
    """Each test of whole systems that names the fault which it alone finds: (place, fault)."""
    for file in sorted(TESTS.rglob("test_*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                marks, name = node.decorator_list, f"::{node.name}"
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
                marks, name = [node.value], ""
            else:
                continue
            for mark in marks:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.system" and mark.args:
                    yield f"{file.relative_to(TESTS)}{name}", ast.literal_eval(mark.args[0])


def page(items: list[Item]) -> str:
    """The page."""
    whole = sum(item.seconds for item in items)
    top = items[:SLOWEST]
    share = sum(item.seconds for item in top) / whole
    lines = [
        "# Where the time of `make test` goes",
        "",
        "Written by `make durations`.",
        "",
        f"{len(items):,} items take {whole:,.0f} s of the workers together; the slowest {len(top)} take {share:.0%}.",
        "",
        "| seconds | test | what it buys |",
        "|--:|---|---|",
        *(f"| {item.seconds:.1f} | `{item.place}` | {what_it_buys(item.place)} |" for item in top),
        "",
        "## What only `make test-system` finds",
        "",
        "| test | fault |",
        "|---|---|",
        *(f"| `{place}` | {fault} |" for place, fault in named_faults()),
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="a JUnit report of pytest")
    report = parser.parse_args().report
    if not report.is_file():
        sys.exit(f"no report at `{report}`: run `make durations`, or pytest with --junitxml={report}")
    PAGE.write_text(page(slowest_items(report)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
