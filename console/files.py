"""Reads and writes commands' files; errors name the file."""

from __future__ import annotations

from pathlib import Path

from kvcustody.errors import ConfigError
from kvcustody.files import evidence_folder, evidence_mode, write_file


def read_file(path: Path) -> bytes:
    """Return a file's bytes.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"file `{path}`: {error.strerror}", path=path) from error


def read_words(path: Path) -> str:
    """Return the text of a file that a person wrote, with or without a byte order mark. Raises as `read_file` does."""
    return read_file(path).decode("utf-8-sig", errors="replace")


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    """Write files into a folder, each completely or not at all.

    Raises:
        ConfigError: a file cannot be written.
    """
    try:
        evidence_folder(folder)
        for name, data in files.items():
            write_file(folder / name, data, mode=evidence_mode())
    except OSError as error:
        raise ConfigError(f"folder `{folder}`: {error.strerror}", path=folder) from error
