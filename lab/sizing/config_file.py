"""Reads a model's `config.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from kvcustody.errors import ConfigError


def read_config(path: Path) -> dict[str, Any]:
    """Read the JSON object in `path`.

    Raises:
        ConfigError: it cannot be read, or is no object.
    """
    try:
        document = orjson.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read config `{path}`: {error.strerror or error}", path=str(path)) from None
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}:{error.colno}: not JSON ({error.msg})", path=str(path)) from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: expected a JSON object, got `{type(document).__name__}`", path=str(path))
    return document
