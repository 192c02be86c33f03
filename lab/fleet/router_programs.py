"""Routers that pip installs: how to find their program, and how to start it over workers.

Flags are those of the router's page in `docs/reference/routers/`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple


class RouterProgram(NamedTuple):
    """A router. `package`: what pip installs. `words`: arguments after the program. `bounds`: flags that bound its
    memory.
    """

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
    """Return a program from the folders, from beside this Python or from PATH; None where it is not installed."""
    for folder in (*folders, Path(sys.executable).parent):
        if (found := folder / name).is_file():
            return found.absolute()
    on_path = shutil.which(name)
    return None if on_path is None else Path(on_path)


def missing_modules(python: str | Path, modules: Iterable[str]) -> tuple[str, ...]:
    """Return which of these modules another Python lacks.

    Raises:
        OSError: It does not run.
        subprocess.SubprocessError: It runs, and not as a Python.
    """
    look = "import importlib.util as u, sys; print(*[name for name in sys.argv[1:] if u.find_spec(name) is None])"
    done = subprocess.run(  # noqa: S603 - an interpreter that its user names
        [python, "-c", look, *modules], capture_output=True, text=True, timeout=60, check=True
    )
    return tuple(done.stdout.split())


def find_python(modules: Iterable[str], folders: Iterable[Path]) -> Path | None:
    """Return the folders' first interpreter that has all of these modules, or None."""
    wanted = tuple(modules)
    for folder in folders:
        python = folder / "python"
        with suppress(OSError, subprocess.SubprocessError):
            if python.is_file() and not missing_modules(python, wanted):
                return python.absolute()
    return None


def dynamo_command(python: Path, workers: Mapping[str, str], *, port: int) -> list[str]:
    """Return the command that starts Dynamo's selection service as a router; `workers`: event addresses by worker
    URL.
    """
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
    """Return the command that starts a router on loopback over workers' URLs. `policy`: the router's own name for its
    placement.
    """
    known = ROUTERS[name]
    urls = ["--worker-urls", *workers, "--policy", policy, "--host", "127.0.0.1", "--port", str(port)]
    more = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port), "--log-level", "error"]
    return [str(program), *known.words, *urls, *more, *(known.bounds if is_bounded else ())]
