"""Which releases of each engine are governed, and what the newest one breaks.

    python tests/engines/releases/newest.py              # asks pip what is newest, and says how it stands
    python tests/engines/releases/newest.py --run        # and runs the suite on one that nobody tested, refused or not
    python tests/engines/releases/newest.py --run --only vllm==0.34.0
    python tests/engines/releases/newest.py --page       # the table of docs/reference/engines/releases.md

A release that is refused is run with its bounds widened in its tests' processes alone (`tried_release.py`): what broke
is then what stands between it and being governed. Exit code 1: a release that nobody tested broke something, or is
refused. It changes no environment that is there.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "lib"))

from kvcustody.governance.worker.known_engines import VLLM_BELOW, VLLM_OLDEST
from kvcustody.integrations.sglang.check_engine import VERSIONS as SGLANG
from kvcustody.integrations.transformers.batching.governed_batching import BEYOND, FIRST
from standins.engines.releases.tried_release import TRIED

ROOT = Path(__file__).resolve().parents[3]


class GovernedEngine(NamedTuple):
    """`tested`: the releases of the suites, newest first. Accepted is what lies from `first` to below `beyond`.

    No bounds: nothing of ours starts in it, and no release is refused.
    """

    name: str
    distribution: str
    tested: tuple[str, ...]
    first: tuple[int, ...]
    beyond: tuple[int, ...]
    suite: tuple[str, ...]
    otherwise: str

    @property
    def tested_text(self) -> str:
        return ", ".join(self.tested)


def _after(version: str) -> tuple[int, ...]:
    *most, last = numbers(version)
    return (*most, last + 1)


def numbers(version: str) -> tuple[int, ...]:
    """The release's leading numbers."""
    leading = re.split(r"\+|\.post", version, maxsplit=1)[0]
    return tuple(int(part) for part in re.findall(r"\d+", leading))


ENGINES = (
    GovernedEngine(
        "vLLM", "vllm", ("0.33.0", "0.32.0"), VLLM_OLDEST, VLLM_BELOW,
        ("tests/engines/run.sh", "--version", "VERSION", "--core"),
        "refused at start, and so is one whose classes or signatures differ",
    ),
    GovernedEngine(
        "SGLang", "sglang", SGLANG[-1:], numbers(SGLANG[0]), _after(SGLANG[-1]),
        ("tests/engines/run.sh", "--sglang", "--version", "VERSION"),
        "refused at start, and so is one whose methods differ",
    ),
    GovernedEngine(
        "transformers", "transformers", ("5.24.0",), FIRST, BEYOND,
        ("tests/engines/transformers/run.sh", "VERSION"),
        "refused at start, and so is one whose internals differ",
    ),
    GovernedEngine(
        "LMCache", "lmcache", ("0.5.7rc2", "0.5.6"), (0, 5, 6), (0, 5, 8),
        ("tests/engines/lmcache/run.sh", "--version", "VERSION"),
        "not asked: its adapter and module look for what they rest on, and do not start without it",
    ),
    GovernedEngine(
        "[Dynamo](dynamo.md)", "ai-dynamo-runtime", ("1.6.1",), (), (), ("tests/engines/dynamo/run.sh",),
        "not asked: it reads our events, and the door stands before it",
    ),
    GovernedEngine(
        "[Mooncake](mooncake.md)", "mooncake-transfer-engine-non-cuda", ("0.3.13.post1",), (), (),
        ("tests/engines/mooncake/run.sh",), "not asked: events alone go to and fro",
    ),
)  # fmt: skip


def how_it_stands(engine: GovernedEngine, version: str) -> str:
    """`tested`, `accepted` (not tested), or `refused`."""
    if version in engine.tested:
        return "tested"
    if not engine.beyond:
        return "accepted"
    return "accepted" if engine.first <= numbers(version) < engine.beyond else "refused"


def newest(distribution: str) -> str:
    """What pip says; empty where it does not know."""
    command = [sys.executable, "-m", "pip", "index", "versions", distribution]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"\(([^)]+)\)", done.stdout)
    return found[1] if found else ""


def table() -> str:
    """Of the code alone: no network."""
    lines = ["| engine | tested | accepted at start | another release |", "|---|---|---|---|"]
    for one in ENGINES:
        first, beyond = (".".join(map(str, bound)) for bound in (one.first, one.beyond))
        accepted = f"`>={first},<{beyond}`" if beyond else "any release"
        lines.append(f"| {one.name} | {one.tested_text} | {accepted} | {one.otherwise} |")
    return "\n".join(lines)


def run_suite(engine: GovernedEngine, version: str) -> list[str]:
    """What failed, by name."""
    command = [word.replace("VERSION", version) for word in engine.suite]
    environment = dict(os.environ)
    if how_it_stands(engine, version) == "refused":
        environment[TRIED] = f"{engine.distribution}=={version}"
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    if not done.returncode and "SKIPPED: " in done.stderr:
        return ["not tried: it cannot be installed here"]
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, flags=re.M)
    return failed or ([f"exit code {done.returncode}"] if done.returncode else [])


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--only", metavar="ENGINE[==RELEASE]", default="", help="this one, of this release")
    chosen = parser.parse_args(words)
    if chosen.page:
        print(table())
        return 0
    status = 0
    only, _, asked = chosen.only.partition("==")
    engines = [engine for engine in ENGINES if only in ("", engine.distribution)]
    if not engines:
        parser.error(f"--only: `{only}` is none of {', '.join(engine.distribution for engine in ENGINES)}")
    for engine in engines:
        version = asked or newest(engine.distribution)
        stands = how_it_stands(engine, version) if version else "unknown to pip"
        print(
            f"{engine.name}: {'' if asked else 'newest '}{version or '-'} is {stands} (tested {engine.tested_text})",
            flush=True,
        )
        status |= stands == "refused"
        if chosen.run and stands in ("accepted", "refused"):
            broken = run_suite(engine, version)
            status |= bool(broken)
            print(*(f"  broke: {name}" for name in broken or ["nothing"]), sep="\n", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
