"""Write `requirements.lock`: every package of the development environment with the hashes of all its files.

    .venv/bin/python packaging/lock.py            # after a change of pyproject.toml or constraints.txt
    .venv/bin/python packaging/lock.py --check    # whether the lock names what is installed here; asks nobody

Versions are those of the environment that runs this; hashes are what PyPI publishes for them, every platform's. torch
is left out: it is the CPU build of one's own index, and `constraints.txt` pins its version.
"""

from __future__ import annotations

import argparse
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distributions
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements.lock"
INDEX = "https://pypi.org/simple/{}/"
ACCEPT = "application/vnd.pypi.simple.v1+json"
LEFT_OUT = {"torch", "kvcustody", "kvcustody-testkit", "pip", "setuptools", "wheel"}
MARKERS = {"triton": 'sys_platform == "linux"', "uvloop": 'sys_platform != "win32"'}
HEAD = "# Made by packaging/lock.py; `make setup` installs nothing else. Every file's hash is checked.\n"


def canonical(name: str) -> str:
    """A project's name as indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed() -> dict[str, str]:
    """Name and version of every package here that the lock is about."""
    found = {canonical(each.metadata["Name"]): each.version for each in distributions()}
    return {name: version for name, version in sorted(found.items()) if name not in LEFT_OUT}


def hashes(name: str, version: str) -> list[str]:
    """SHA-256 of every file that the index has of this version."""
    answer = httpx.get(INDEX.format(name), headers={"Accept": ACCEPT}, timeout=60, follow_redirects=True)
    files = answer.raise_for_status().json()["files"]
    spelled = version.split("+", maxsplit=1)[0]
    ours = re.compile(rf"{name.replace('-', '[-_.]+')}-{re.escape(spelled)}(-.*\.whl|\.tar\.gz|\.zip)", re.IGNORECASE)
    return sorted(each["hashes"]["sha256"] for each in files if ours.fullmatch(each["filename"]))


def locked() -> dict[str, str]:
    """Name and version of what the lock has."""
    lines = LOCK.read_text(encoding="utf-8").splitlines()
    pins = (line.split(" ")[0].split(";")[0] for line in lines if "==" in line and not line.startswith(("#", " ")))
    return dict(pin.split("==") for pin in pins)


def main() -> int:
    """Write the lock, or check it; 1 where it is behind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with what is installed; write nothing")
    here = installed()
    if parser.parse_args().check:
        behind = dict(set(here.items()) ^ set(locked().items()))
        for name in sorted(behind):
            print(f"{name}: installed {here.get(name, '-')}, locked {locked().get(name, '-')}")
        return int(bool(behind))
    with ThreadPoolExecutor(8) as pool:
        digests = dict(zip(here, pool.map(hashes, here, here.values()), strict=True))
    missing = [name for name, listed in digests.items() if not listed]
    if missing:
        print(
            f"the index has no file of: {', '.join(f'{name}=={here[name]}' for name in missing)}",
            file=sys.stderr,
        )
        return 1
    parts = [HEAD]
    for name, version in here.items():
        marker = f" ; {MARKERS[name]}" if name in MARKERS else ""
        listed = "".join(f" \\\n    --hash=sha256:{digest}" for digest in digests[name])
        parts.append(f"{name}=={version}{marker}{listed}\n")
    LOCK.write_text("".join(parts), encoding="utf-8")
    print(f"{LOCK.name}: {len(here)} packages, {sum(map(len, digests.values()))} files")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
