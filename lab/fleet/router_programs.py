"""Routers that pip installs: where their program is, and how it is started over workers.

Flags are those of the router's page in `docs/reference/routers/`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple


class RouterProgram(NamedTuple):
    """`package`: what pip installs. `words`: behind the program's name. `bounds`: flags that bound what it keeps."""

    program: str
    package: str
    words: tuple[str, ...] = ()
    bounds: tuple[str, ...] = ()


ROUTERS: Final = {
    "smg": RouterProgram(
        "smg",
        "smg==1.13.0",
        ("launch",),
        ("--history-backend", "none", "--retry-max-retries", "3", "--eviction-interval-secs", "30"),
    ),
    "vllm-router": RouterProgram("vllm-router", "vllm-router==0.1.17", (), ("--eviction-interval-secs", "30")),
}
DYNAMO: Final = "dynamo"
DYNAMO_PACKAGES: Final = ("ai-dynamo-runtime==1.6.1", "'kvcustody[events]'")
DYNAMO_MODULES: Final = ("dynamo", "kvcustody", "zmq", "numpy")  # that its Python must have
RETRIES: Final = 2  # that these flags let a router make of one request


def find_program(name: str, folders: Iterable[Path] = ()) -> Path | None:
    """A program in the folders, beside this Python or on PATH; None where it is not installed."""
    for folder in (*folders, Path(sys.executable).parent):
        if (found := folder / name).is_file():
            return found.absolute()
    on_path = shutil.which(name)
    return None if on_path is None else Path(on_path)


def find_python(modules: Iterable[str], folders: Iterable[Path]) -> Path | None:
    """An interpreter in the folders that has all of these modules; None where there is none."""
    code = f"import importlib.util as u; assert all(u.find_spec(one) for one in {[*modules]!r})"
    for folder in folders:
        python = folder / "python"
        if (
            python.is_file()
            and not subprocess.run(  # noqa: S603 - an interpreter that its user names
                [python, "-c", code], capture_output=True, check=False
            ).returncode
        ):
            return python.absolute()
    return None


def dynamo_command(python: Path, workers: Mapping[str, str], *, port: int) -> list[str]:
    """How Dynamo's selection service is started as a router; `workers`: where each tells its blocks, by its URL."""
    told = [word for url, events in workers.items() for word in ("--worker", f"{url}={events}")]
    return [str(python), "-m", "kvcustody.lab.fleet.dynamo_front", "--port", str(port), *told]


def router_command(
    name: str,
    program: Path,
    workers: Sequence[str],
    *,
    port: int,
    metrics_port: int,
    policy: str = "cache_aware",
    is_bounded: bool = False,
) -> list[str]:
    """How a router is started on loopback over workers' URLs. `policy`: its own word for how it places requests."""
    known = ROUTERS[name]
    urls = ["--worker-urls", *workers, "--policy", policy, "--host", "127.0.0.1", "--port", str(port)]
    more = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port), "--log-level", "error"]
    return [str(program), *known.words, *urls, *more, *(known.bounds if is_bounded else ())]
