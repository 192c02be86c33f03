"""The house names itself: small folders, a sentence for every package and module, no name or code used twice."""

from __future__ import annotations

import ast
import collections
import re
import subprocess
from pathlib import Path

import pytest

from standins.architecture.module_graph import ROOT, sources
from standins.architecture.parsed import parsed

FILES_MAX = 15
GROWS = {
    "migrations/versions": "one revision a file, for ever",
    "docs/build/adr": "one decision a file, for ever",
    "audit/reports/sections": "one section of a report a file, which nothing else lists",
}
CODE = re.compile(r"^([A-Z]{1,6}\d{1,2})[ .]")


def tracked(pattern: str) -> list[Path]:
    done = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", pattern],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in done.stdout.split() if (ROOT / name).exists()]


def too_large(paths: list[Path]) -> dict[str, int]:
    sizes = collections.Counter(str(path.parent.relative_to(ROOT)) for path in paths if path.name != "__init__.py")
    return {name: count for name, count in sizes.items() if count > FILES_MAX and name not in GROWS}


def docstring_codes(text: str) -> list[str]:
    """The rule codes that a module's docstring defines: at the beginning of a line."""
    return [found[1] for line in text.splitlines() if (found := CODE.match(line.strip()))]


def test_no_folder_is_larger_than_a_reader_can_hold() -> None:
    paths = tracked("*.py")
    assert len(paths) > 900
    assert too_large(paths) == {}
    assert too_large([*paths, *(ROOT / "more" / f"more_{number}.py" for number in range(16))]) == {"more": 16}


@pytest.mark.parametrize("kind", ["*.html", "*.md", "*.sh", "*.yaml", "*.json"])
def test_nor_is_one_of_other_files(kind: str) -> None:
    assert {name: size for name, size in too_large(tracked(kind)).items() if not name.endswith("results")} == {}


def test_every_module_says_what_it_is() -> None:
    silent = []
    for name, path in sources().items():
        text = ast.get_docstring(parsed(path)) or ""
        if len(text.split()) < 4 or not re.search(r"[.:?)`]", text):
            silent.append(f"{name}: {text!r}")
    assert silent == []


LEFT_BY_A_RUN = re.compile(r"\.(db|db-wal|db-shm|spill|key)$|\.lock$|(^|/)keys\.json$")
KEPT = {"requirements.lock"}


def left_by_a_run(names: list[str]) -> list[str]:
    return [name for name in names if LEFT_BY_A_RUN.search(name) and name not in KEPT]


def test_no_ledger_or_key_of_a_run_stays_in_the_repository() -> None:
    assert left_by_a_run([str(path.relative_to(ROOT)) for path in tracked("*")]) == []
    assert left_by_a_run(["case/ledger.db", "case/root.key", "case/keys.json", "audit/key.py"]) == [
        "case/ledger.db",
        "case/root.key",
        "case/keys.json",
    ]


def test_no_class_name_means_two_things() -> None:
    homes = collections.defaultdict(list)
    for name, path in sources().items():
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(name)
    assert len(homes) > 800
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


def test_no_rule_code_means_two_things() -> None:
    homes = collections.defaultdict(list)
    for name, path in sources().items():
        for code in docstring_codes(ast.get_docstring(parsed(path)) or ""):
            homes[code].append(name)
    assert {code: where for code, where in homes.items() if len(where) > 1} == {}
    assert docstring_codes("Opens.\n\nW1 Nothing is admitted.\n    W2  Neither.\nNot W3.") == ["W1", "W2"]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_of_the_first_pages_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", (ROOT / page).read_text(encoding="utf-8"))
    assert len(links) > 3 and [link for link in links if not (ROOT / link).exists()] == []
