"""Foreign files in an export's folder, which a reader might take for part of the log.

1. The folder holds exactly the plain files that are expected and the folders that these need. Another file, an empty or
   additional folder, a link of any kind, a device: each is named.
2. What does not belong is not entered: a forged tree of folders costs the verifier one line.
3. A file that is missing is found by who reads it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
from pathlib import Path, PurePosixPath


def strays(folder: Path, expected: Set[str]) -> Iterator[str]:
    """Yield what does not belong beside the `expected` files (paths with `/`), in order of folders; raises
    `OSError`.
    """
    parents = {str(parent) for path in expected for parent in PurePosixPath(path).parents} - {"."}
    inside = [""]
    while inside:
        at = inside.pop()
        with os.scandir(folder / at) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        for entry in entries:
            path = f"{at}/{entry.name}" if at else entry.name
            if entry.is_dir(follow_symlinks=False) and path in parents:
                inside.append(path)
            elif not (entry.is_file(follow_symlinks=False) and path in expected):
                yield path
