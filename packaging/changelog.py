"""Puts the fragments of `changelog.d` together as CHANGELOG.md, newest first, each change under its heading.

    .venv/bin/python packaging/changelog.py            # at a release, and whenever it is to be read in one piece

A fragment holds sections: `### Added`, `### Changed` and so on; what stands before the first is a change. A section
of any other name comes behind those. The first line of the file says up to which fragment it goes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET, VERSION = ROOT / "CHANGELOG.md", ROOT / "src" / "kvcustody" / "_version.py"
HEADINGS = ("Added", "Changed", "Fixed", "Removed", "Security")


def read_fragments(folder: Path = ROOT / "changelog.d") -> dict[str, str]:
    """The text of every fragment by its file's name, newest first."""
    found = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}
    return dict(sorted(found.items(), reverse=True))


def sections(text: str) -> dict[str, str]:
    """What a fragment says under each heading."""
    text = re.sub(r"^# (.+)$", r"**\1.**", text, flags=re.MULTILINE)
    before, *parts = re.split(r"^### (.+)$", text, flags=re.MULTILINE)
    made = {"Changed": before.strip("\n")} if before.strip() else {}
    for heading, body in zip(parts[::2], parts[1::2], strict=True):
        made[heading.strip()] = "\n".join(filter(None, (made.get(heading.strip()), body.strip("\n"))))
    return made


def changelog(fragments: Mapping[str, str], version: str) -> str:
    """The whole file."""
    by_heading: dict[str, list[str]] = {heading: [] for heading in HEADINGS}
    for text in fragments.values():
        for heading, body in sections(text).items():
            by_heading.setdefault(heading, []).append(body)
    lines = [
        f"<!-- packaging/changelog.py: fragments up to {next(iter(fragments))} -->",
        "",
        "# Changelog",
        "",
    ]
    lines += [f"## {version}, not released yet", ""]
    for heading, bodies in by_heading.items():
        lines += [f"### {heading}", "", *bodies, ""] if bodies else []
    return "\n".join(lines)


def main() -> None:
    """Write the file."""
    version = re.search(r'__version__ = "(.+)"', VERSION.read_text(encoding="utf-8"))
    assert version is not None, "the version is a string"
    TARGET.write_text(changelog(read_fragments(), version[1]), encoding="utf-8")


if __name__ == "__main__":
    main()
