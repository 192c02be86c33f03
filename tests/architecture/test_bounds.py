"""Every bound that the code has at run time stands in the threat model, with who shares it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from standins.architecture.parsed import parsed_text

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "security" / "shared-bounds.md"
HEADING = "# What tenants share, and in which shares"
# What serves requests. Other rooms read one document, export, report or trace at a time, for whoever asks.
ROOMS = (
    "allocator",
    "audit/evidence/processes",
    "audit/evidence/query",
    "audit/evidence/subjects",
    "audit/kinds",
    "audit/leaf",
    "audit/siem",
    "audit/store/database",
    "audit/tlog/witness",
    "audit/write",
    "console/web",
    "governance",
    "integrations/events",
    "integrations/identity",
    "integrations/jetstream",
    "integrations/tensorrt_llm",
    "integrations/transformers",
    "integrations/vllm",
)
_NAMED = re.compile(r"(^|_)(MAX|max|CAPACITY|capacity)(_|$)|_LIMIT$|_limit$|maxlen|maxsize")
_MADE = {"CapacityLimiter", "Semaphore", "BoundedSemaphore", "Queue", "LifoQueue", "lru_cache"}


def bounds(source: str) -> set[str]:
    """The names of constants, fields, parameters and makers that bound something."""
    constants: set[str] = set()
    for node in ast.walk(parsed_text(source)):
        if isinstance(node, ast.Assign):
            names = [name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        elif isinstance(node, ast.arg) or (isinstance(node, ast.keyword) and node.arg in ("maxlen", "maxsize")):
            names = [node.arg]
        elif isinstance(node, ast.Call):
            function = node.func
            called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            constants |= {called} & _MADE
            continue
        else:
            continue
        constants |= {name for name in names if _NAMED.search(name)}
    return constants


def in_code() -> dict[str, set[str]]:
    """Where each bound is."""
    found: dict[str, set[str]] = {}
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            for name in bounds(path.read_text()):
                found.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    return found


def rows() -> Iterator[list[str]]:
    """The cells of the table."""
    page = PAGE.read_text()
    section = page[page.index(HEADING) + len(HEADING) :]
    for line in section.partition("\n## ")[0].splitlines():
        if line.startswith("| ") and not line.startswith(("| bound", "|---")):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def in_table() -> set[str]:
    return {name for cells in rows() for name in re.findall(r"`([^`]+)`", cells[0])}


def test_every_bound_has_a_row() -> None:
    found = in_code()
    missing = {name: sorted(found[name]) for name in found.keys() - in_table()}
    assert not missing, f"say in {PAGE.name} who shares these bounds, and in which shares: {missing}"


def test_every_row_is_of_a_bound_that_is_there_and_says_who_shares_it() -> None:
    gone = in_table() - in_code().keys()
    assert not gone, f"rows of bounds that are nowhere: {sorted(gone)}"
    assert all(len(cells) == 3 and all(cells) for cells in rows()), "bound, shared by, share or why none is needed"


def test_a_bound_is_found_however_it_is_made() -> None:
    """The control: each way in which one could come in is seen."""
    made = bounds(
        "_WAITING_MAX = 64\ndef f(residencies_max: int, other: int): ...\nclass A:\n    spill_bytes_max: int = 3\n"
        "import queue\nq = queue.Queue(5)\nd = deque(maxlen=7)\nlimiter = anyio.CapacityLimiter(32)\nplain = 3\n"
    )
    assert made == {
        "_WAITING_MAX",
        "residencies_max",
        "spill_bytes_max",
        "Queue",
        "maxlen",
        "CapacityLimiter",
    }
