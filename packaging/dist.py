"""Write what a release consists of into `dist/`: wheels, a source distribution, an SBOM and checksums (`make dist`).

    .venv/bin/python packaging/dist.py [FOLDER]

1. Everything is made from the commit, never from files beside it.
2. The same commit gives the same bytes: `SOURCE_DATE_EPOCH` is the commit's time, and the tools are those of the lock.
3. `kvcustody.cdx.json` lists the packages that `kvcustody[all]` needs, with the versions of the lock (CycloneDX 1.6).
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
SBOM = "kvcustody.cdx.json"
SUMS = "SHA256SUMS"


def run(*command: str | Path, cwd: Path = ROOT, given: bytes = b"", **environment: str) -> bytes:
    """Return a command's output; its errors are shown."""
    done = subprocess.run(  # noqa: S603 - our own tools
        command, cwd=cwd, env=os.environ | environment, input=given, stdout=subprocess.PIPE, check=True
    )
    return done.stdout


def build(folder: Path) -> list[Path]:
    """Build the distributions of the newest commit into a folder.

    Returns:
        The files, in the order of their names, with the checksums last.
    """
    folder.mkdir(parents=True, exist_ok=True)
    epoch = run("git", "log", "-1", "--format=%ct").decode().strip()
    with tempfile.TemporaryDirectory() as place:
        source, built = Path(place) / "source", Path(place) / "built"
        source.mkdir()
        built.mkdir()
        run("tar", "-x", "-C", source, given=run("git", "archive", "HEAD"))
        out = ("--no-isolation", "--outdir", str(built))
        of_source = {"SOURCE_DATE_EPOCH": epoch, "PYTHONPATH": str(source / "src"), "PYTHONHASHSEED": "0"}
        run(sys.executable, "-m", "build", *out, cwd=source, **of_source)
        run(sys.executable, "-m", "build", "--wheel", *out, cwd=source / "packaging" / "testkit", **of_source)
        (built / SBOM).write_text(json.dumps(sbom(epoch), indent=1, sort_keys=True) + "\n")
        for path in built.glob("*.tar.gz"):
            _repack(path, int(epoch))
        paths = sorted(built.iterdir())
        sums = (f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in paths)
        (built / SUMS).write_text("".join(sums))
        return [Path(shutil.copy(path, folder)) for path in (*paths, built / SUMS)]


def _repack(path: Path, epoch: int) -> None:
    """Give the files of a source distribution one owner, one time and an order: its maker writes those of the build."""
    with tarfile.open(path) as archive:
        members = [(member, archive.extractfile(member)) for member in archive.getmembers()]
        contents = {member.name: (member, file.read() if file else b"") for member, file in members}
    with (
        path.open("wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for _, (member, content) in sorted(contents.items()):
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mtime, member.pax_headers = epoch, {}
            archive.addfile(member, io.BytesIO(content))


def needed(name: str, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]) -> None:
    """Add what a distribution needs with these extras to `seen`, and what that needs; absent packages are left out."""
    for text in distribution(name).requires or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras | {""}):
            key = canonicalize_name(requirement.name), frozenset(requirement.extras)
            if key not in seen and not _is_absent(key[0]):
                seen.add(key)
                needed(*key, seen)


def _is_absent(name: str) -> bool:
    """Whether a package is not installed: it is of another platform, or the lock leaves it out."""
    try:
        distribution(name)
    except PackageNotFoundError:
        return True
    return False


def sbom(epoch: str) -> dict[str, Any]:
    """Return the CycloneDX document of `kvcustody[all]`; `epoch`: its time in seconds."""
    seen: set[tuple[str, frozenset[str]]] = set()
    needed("kvcustody", frozenset({"all"}), seen)
    packages = {name: distribution(name).version for name, _ in seen if name != "kvcustody"}
    version = distribution("kvcustody").version
    components = [
        {"type": "library", "name": name, "version": number, "purl": f"pkg:pypi/{name}@{number}", "bom-ref": name}
        for name, number in sorted(packages.items())
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(int(epoch), UTC).isoformat().replace("+00:00", "Z"),
            "component": {
                "type": "application",
                "name": "kvcustody",
                "version": version,
                "bom-ref": "kvcustody",
            },
        },
        "components": components,
        "dependencies": [{"ref": "kvcustody", "dependsOn": sorted(packages)}],
    }


def main() -> int:
    """Build into the folder of the first argument, or into `dist/`."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dist"
    for path in build(folder):
        print(f"{path.stat().st_size:>12,}  {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
