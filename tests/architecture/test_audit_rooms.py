"""The rooms of audit/ read in one order: each imports from those before it alone, so nothing points back up."""

import ast
from pathlib import Path

import pytest

from standins.architecture.parsed import parsed_text

AUDIT = Path(__file__).resolve().parents[2] / "audit"
ROOMS = (
    *("kinds", "leaf", "store", "tlog", "project", "evidence", "write", "exports", "reports", "verify"),
    *("keep", "siem"),
)


def room_of(path: Path) -> str:
    return path.relative_to(AUDIT).parts[0].removesuffix(".py")


def pointing_up(room: str, source: str) -> list[str]:
    """What a file of a room imports from a room that comes after it."""
    names = [
        f"{node.module}.{alias.name}" if node.module == "kvcustody.audit" else str(node.module)
        for node in ast.walk(parsed_text(source))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    targets = [name.split(".")[2] for name in names if name.startswith("kvcustody.audit.")]
    return sorted({target for target in targets if ROOMS.index(target) > ROOMS.index(room)})


def test_every_room_of_audit_has_its_place() -> None:
    here = {room_of(path) for path in AUDIT.rglob("*.py")}
    assert here == {*ROOMS}


@pytest.mark.parametrize("room", ROOMS)
def test_no_arrow_points_back_up_inside_audit(room: str) -> None:
    paths = [path for path in AUDIT.rglob("*.py") if room_of(path) == room]
    found = {
        str(path.relative_to(AUDIT)): above
        for path in paths
        if (above := pointing_up(room, path.read_text(encoding="utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("leaf", "from kvcustody.audit.store.schema.ledger import events"),
        ("kinds", "from kvcustody.audit.leaf import leaves"),
        ("evidence", "from kvcustody.audit import verify"),
    ],
)
def test_an_arrow_that_points_up_would_be_seen(room: str, source: str) -> None:
    """The control."""
    assert pointing_up(room, source)


@pytest.mark.parametrize("banned", ["sqlalchemy", "fastapi", "httpx", "kvcustody.audit.siem"])
def test_a_kind_of_event_knows_no_database_and_no_wire(banned: str) -> None:
    imported = {
        name.split(".")[0] if "kvcustody" not in name else name
        for path in (AUDIT / "kinds").glob("*.py")
        for node in ast.walk(parsed_text(path.read_text(encoding="utf-8")))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [str(node.module)]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert "msgspec" in imported and not any(name.startswith(banned) for name in imported)
