"""docs/build/engine-port.md: its example runs as it stands, and its figures are those of the kit."""

import re
from pathlib import Path

from kvcustody.testkit.conformance import ALL, FAULTS
from kvcustody.testkit.conformance.mutants import native, reference

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE = "".join((DOCS / name / "engine-port.md").read_text(encoding="utf-8") for name in ("build", "reference/formats"))


def test_the_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(example, "docs/build/engine-port.md", "exec"), names)
    assert names["engine"].allocated == 4 + 1 + 4 + 4


def test_its_figures_are_the_kits():
    assert f"| {len(ALL)} pass | {len(reference.MUTANTS)} of {len(reference.MUTANTS)} killed |" in PAGE
    killed = f"{len(native.MUTANTS)} of {len(native.MUTANTS)} killed, {len(native.NOT_APPLICABLE)} do not apply"
    assert killed in PAGE
    assert len(native.MUTANTS) + len(native.NOT_APPLICABLE) == len(FAULTS) == len(reference.MUTANTS)


def test_every_case_that_it_names_exists():
    names = {case.name for case in ALL}
    rooms = {name.split("/")[0] for name in names}
    for named in re.findall(r"`([a-z]+/[a-z*-]+)`", PAGE):
        room = named.split("/")[0]
        if room in rooms:
            assert any(re.fullmatch(named.replace("*", ".*"), name) for name in names), named


def test_every_call_of_the_table_is_one_of_the_port() -> None:
    from kvcustody import EnginePort

    table = PAGE.split("| when | the engine calls |", 1)[1].split("\n\n", 1)[0]
    calls = re.findall(r"^\|[^|]*\| ((?:`\w+\([^`]*`(?:, )?)+)", table, re.MULTILINE)
    named = {name for cell in calls for name in re.findall(r"`(\w+)\(", cell)}
    assert len(named) > 15
    assert {name for name in named if not hasattr(EnginePort, name)} == set()
