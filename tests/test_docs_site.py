"""The pages are whole where people read them: `make docs` fails on broken links, and committed tables are fresh."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvcustody.allocator.pool.block_state import TRANSITIONS
from kvcustody.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
COMMITTED_LINES_MAX = 6_000


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tables, diagrams = _script("tables"), _script("diagrams")


@pytest.mark.system("a committed table is stale; `make docs` finds it, too")
def test_every_table_is_fresh_and_stands_on_one_page() -> None:
    assert tables.write(DOCS, check=True) == [], "run `make tables`"
    pages = "".join(path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md"))
    assert {name: pages.count(f"<!-- table: {name} -->") for name in tables.TABLES} == dict.fromkeys(tables.TABLES, 1)
    committed = {name: make().count("\n") for name, make in tables.TABLES.items()}
    assert min(committed.values()) > 3 and max(committed.values()) <= tables.LINES_MAX
    assert sum(committed.values()) <= COMMITTED_LINES_MAX


def test_a_stale_table_is_named_and_written_anew(tmp_path: Path) -> None:
    page = tmp_path / "codes.md"
    page.write_text(fresh := (DOCS / "reference" / "policy-codes.md").read_text(encoding="utf-8"), encoding="utf-8")
    command = [sys.executable, str(DOCS / "tables.py"), str(tmp_path)]
    page.write_text(stale := fresh.replace("KVP101 |", "KVP101 (old) |"), encoding="utf-8")
    check = subprocess.run([*command, "--check"], capture_output=True, text=True, check=False)
    assert check.returncode == 1 and check.stdout.startswith(f"{page}: its tables are stale")
    assert page.read_text(encoding="utf-8") == stale != fresh, "a check writes nothing"
    assert tables.write(tmp_path) == [page]
    assert page.read_text(encoding="utf-8") == fresh and tables.write(tmp_path) == []


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("<!-- table: sttings -->\n<!-- end of table -->\n", "no table `sttings`: there are api, commands"),
        ("<!-- table: roles -->\n\ntext\n", "`1` of `1` tables have no line"),
        ("<!-- table: roles -->\n<!-- table: metrics -->\n<!-- end of table -->\n", "`1` of `2` tables"),
    ],
)
def test_a_marker_that_makes_no_table_is_refused(page: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tables.fill(page)


def test_a_long_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "LINES_MAX", 5)
    with pytest.raises(ConfigError, match=r"table `metrics` has `\d+` lines, more than `5`"):
        tables.fill("<!-- table: metrics -->\n<!-- end of table -->\n")


def test_every_diagram_is_fresh_and_stands_on_a_page(tmp_path: Path) -> None:
    assert diagrams.write(check=True) == [], "run `make tables`"
    assert [path.stem for path in diagrams.write(tmp_path)] == list(diagrams.DIAGRAMS)
    pages = "".join(path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md"))
    assert [name for name in diagrams.DIAGRAMS if f"images/diagrams/{name}.svg)" not in pages] == []
    (tmp_path / "fleet.svg").write_text("old", encoding="utf-8")
    assert diagrams.write(tmp_path, check=True) == [tmp_path / "fleet.svg"], "control"


def test_the_diagram_of_a_block_has_every_move() -> None:
    drawn = {(arrow.start, arrow.end) for arrow in diagrams.DIAGRAMS["block-lifecycle"].arrows}
    assert drawn == {(start.name, end.name) for start, end in TRANSITIONS}


def make_docs(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the Makefile's `docs` in a copy of what it reads."""
    return subprocess.run(
        ["make", "--old-file=.venv/.ready", "docs"], cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.mark.system("`make docs` passes with a broken link, a broken anchor or a page without navigation")
def test_make_docs_fails_on_a_broken_link_a_broken_anchor_and_a_page_without_navigation(
    tmp_path: Path,
) -> None:
    for name in ("Makefile", "mkdocs.yml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(DOCS, tmp_path / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "benchmarks" / "results", tmp_path / "benchmarks" / "results")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    clean = make_docs(tmp_path)
    assert clean.returncode == 0 and (tmp_path / "site" / "index.html").exists(), clean.stderr

    with (tmp_path / "docs" / "index.md").open("a", encoding="utf-8") as page:
        page.write("\n[link](tutorials/nowhere.md) [anchor](tutorials/first-fleet.md#nowhere)\n")
    (tmp_path / "docs" / "tutorials" / "unlisted.md").write_text("# Unlisted\n", encoding="utf-8")
    planted = make_docs(tmp_path)
    assert planted.returncode != 0
    for named in ("'tutorials/nowhere.md'", "anchor '#nowhere'", "tutorials/unlisted.md"):
        assert named in planted.stderr, planted.stderr
    assert "Aborted with 3 warnings in strict mode" in planted.stdout, "each of them fails by itself"
