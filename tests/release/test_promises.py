"""What releases promise is kept: no operation, policy field, leaf or command of theirs is gone or asks for more."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from standins.release.public_surface import Surface, broken, surface

VECTORS = Path(__file__).resolve().parents[1] / "vectors"
PROMISED = sorted(VECTORS.glob("promised-*.json"))


@pytest.fixture(scope="module")
def offered() -> Surface:
    return surface()


@pytest.mark.parametrize("path", PROMISED, ids=lambda path: path.stem)
def test_every_promise_of_a_release_is_kept(path: Path, offered: Surface) -> None:
    assert broken(json.loads(path.read_text()), offered) == []


def test_the_newest_promise_has_names_of_each_kind() -> None:
    promised = json.loads(PROMISED[-1].read_text())
    assert {kind: bool(names) for kind, names in promised.items()} == dict.fromkeys(
        ("operations", "policy", "leaves", "commands"), True
    )


@pytest.mark.parametrize("kind", ["operations", "policy", "leaves", "commands"])
def test_control_a_broken_promise_is_named(kind: str, offered: Surface) -> None:
    assert broken(offered, offered) == []
    name = next(name for name, parts in offered[kind].items() if parts["fields"])
    later = copy.deepcopy(offered)
    later[kind][name]["fields"].remove(field := offered[kind][name]["fields"][0])
    later[kind][name].setdefault("required", []).append("consent")
    assert broken(offered, later) == [
        f"{kind}: `{name}` lacks `{field}`",
        f"{kind}: `{name}` requires `consent`, which was not required",
    ]
    del later[kind][name]
    assert broken(offered, later) == [f"{kind}: `{name}` is gone"]
    later = offered | {kind: offered[kind] | {"a new one": {"fields": ["x"]}}}
    assert broken(offered, later) == [], "what is added breaks nothing"
