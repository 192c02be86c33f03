"""Modules of kvcustody under the names that they have now, where the measured code has them under earlier ones.

With this folder in PYTHONPATH, a script of this tree measures an earlier commit as well: Python imports this module at
its start.
A module that the measured code has under today's name is left alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

_EARLIER = {  # today's name and that of commit f6818e1f; the longest first
    "audit.store.schema.leaf_tables": "audit.schema.ledger",
    "audit.store.database": "audit.database",
    "audit.store.schema": "audit.schema",
    "audit.verify.ledger": "audit.verify",
    "audit.leaf.merkle": "audit.tlog.merkle",
    "audit.write.fold": "audit.counters.fold",
    "audit.evidence": "audit",
    "audit.reports": "audit.report",
    "audit.kinds": "audit.events",
    "audit.write": "audit.writer",
    "audit.keep": "audit.retention",
    "audit.leaf": "audit.events",
    "audit.store": "audit",
}
_PACKAGE = "kvcustody."


class _Alias(Loader):
    """Gives a module that has another name."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module of that name, which is imported where it is not there yet."""
        module = import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has run, and keeps what it says of itself: its own files are found by that."""
        module.__spec__ = self._spec


class _Finder(MetaPathFinder):
    """Finds what the code in `source` has under earlier names."""

    def __init__(self, source: Path) -> None:
        self._moved = {
            now: earlier
            for now, earlier in _EARLIER.items()
            if not source.joinpath(*now.split(".")).is_dir()
            and not source.joinpath(*now.split(".")).with_suffix(".py").exists()
        }

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A module of an earlier name, where this one has moved."""
        name = fullname.removeprefix(_PACKAGE)
        for now, earlier in self._moved.items() if name != fullname else ():
            if name == now or name.startswith(f"{now}."):
                return ModuleSpec(fullname, _Alias(_PACKAGE + earlier + name.removeprefix(now)))
        return None


for _folder in map(Path, sys.path):
    if (_folder / "kvcustody").is_dir():
        sys.meta_path.insert(0, _Finder(_folder / "kvcustody"))
        break
