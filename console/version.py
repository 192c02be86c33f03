"""`kvcustody version`: the versions that determine how this installation behaves."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

from kvcustody._version import __version__
from kvcustody.console.command import Json, print_json, say

EPILOG = "Example: `kvcustody version --json`"

LIBRARIES = ("numpy", "torch", "triton", "SQLAlchemy", "cryptography")


def version(as_json: Json = False) -> None:
    """Print the versions that decide how this installation behaves."""
    found = versions()
    if as_json:
        print_json(found)
    else:
        for name, value in found.items():
            say(f"{name} {value if value is not None else 'not installed'}")


def versions() -> dict[str, Any]:
    """Return the versions of kvcustody, Python and the libraries that handle memory or the ledger."""
    return {
        "kvcustody": __version__,
        "python": platform.python_version(),
        **{name: _installed(name) for name in LIBRARIES},
    }


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
