"""The routers for a simulated fleet: the model, or a router's own program from its own environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Final

from kvcustody.errors import ConfigError
from kvcustody.lab.fleet.dynamo_router import DynamoRouter
from kvcustody.lab.fleet.fleet_model import FleetShape, Placing, PrefixRouter
from kvcustody.lab.fleet.router_programs import ROUTERS, find_program
from kvcustody.lab.fleet.running_router import RunningRouter

MODEL, DYNAMO = "model", "dynamo"
ROUTER_NAMES: Final = (MODEL, *ROUTERS, DYNAMO)
OpenRouter = Callable[[FleetShape], AbstractContextManager[Placing]]


def router_opener(name: str, programs: Sequence[Path], log_folder: Path) -> OpenRouter:
    """Return a function that opens a fresh router for a fleet's shape.

    Raises:
        ConfigError: the folders do not hold the router's program.

    `programs`: folders with the router's program; for Dynamo with the Python of its environment.
    """
    if name == MODEL:
        return lambda _: nullcontext(PrefixRouter())
    if name == DYNAMO:
        python = next((folder / "python" for folder in programs if (folder / "python").is_file()), None)
        if python is None:
            raise ConfigError("--router dynamo: --programs names the `bin` of an environment with Dynamo")
        return lambda shape: DynamoRouter(python, workers=shape.workers, blocks_max=shape.blocks_max)
    program = find_program(ROUTERS[name].program, programs)
    if program is None:
        package = ROUTERS[name].package
        raise ConfigError(f"`{name}` is not installed; pip install {package} into an environment of its own")
    return lambda shape: RunningRouter(name, program, workers=shape.workers, log_folder=log_folder)
