"""A simulated fleet asks a router's own program: it places by names, and sees the load that is modelled."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvcustody.errors import ConfigError
from kvcustody.lab.fleet.dynamo_router import DynamoRouter
from kvcustody.lab.fleet.fleet_model import CacheChange, FleetShape, Placing
from kvcustody.lab.fleet.open_router import ROUTER_NAMES, router_opener
from kvcustody.lab.fleet.router_programs import ROUTERS, find_program

ROOT = Path(__file__).parents[3]
SHAPE = FleetShape(4, 1)


def folders(name: str) -> list[Path]:
    return [ROOT / f".venv-{name}/bin"]


def is_installed(name: str) -> bool:
    if name == "dynamo":
        return os.access(folders(name)[0] / "python", os.X_OK)
    return find_program(ROUTERS[name].program, folders(name)) is not None


def answered(router: Placing, number: int, name: str, blocks: list[int]) -> int:
    """Place a request, whose worker then has its blocks; it ends."""
    worker = router.place(name, blocks, [0] * SHAPE.workers)
    router.took(worker, name, CacheChange("owner", blocks, []))
    router.first_token(number)
    router.ended(worker, number)
    return worker


@pytest.mark.system("a simulated fleet's router is asked otherwise than a real one")
@pytest.mark.parametrize("name", [one for one in ROUTER_NAMES if one != "model"])
def test_its_own_code_places_by_the_name_and_leaves_who_is_busy(name: str, tmp_path: Path) -> None:
    if not is_installed(name):
        pytest.skip(f"{name} is not installed in an environment of its own")
    with router_opener(name, folders(name), tmp_path)(SHAPE) as router:
        assert isinstance(router, Placing)
        homes: dict[str, set[int]] = {}
        for number in range(24):
            blocks = [number % 6 * 100 + block for block in range(20)]
            who = f"name-{number % 6}"
            homes.setdefault(who, set()).add(answered(router, number, who, blocks))
        assert all(len(workers) == 1 for workers in homes.values()), "a name's prompt goes where it was"
        busy = [router.place(f"other-{number}", [9000 + number], [0] * SHAPE.workers) for number in range(40)]
        counts = [busy.count(worker) for worker in range(SHAPE.workers)]
        assert min(counts) >= 5, "requests that are not over count as load; the control: not all go to one worker"


def test_what_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="not installed"):
        router_opener("smg", [tmp_path], tmp_path)
    with pytest.raises(ConfigError, match="--programs"):
        router_opener("dynamo", [tmp_path], tmp_path)
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho no dynamo here >&2\nexit 3\n")
    script.chmod(0o700)
    with (
        pytest.raises(ConfigError, match="no dynamo here"),
        DynamoRouter(script, workers=1, blocks_max=16),
    ):
        pass
