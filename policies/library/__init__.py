"""Policies to start from; comments in their YAML give the rationale.

1. Every policy here loads and compiles without a problem; a test holds each of them to its rationale.
"""

from __future__ import annotations

from importlib.resources import files

from kvcustody.errors import ConfigError
from kvcustody.policies.document.model import Policy
from kvcustody.policies.document.problems import did_you_mean, quote
from kvcustody.policies.reading.load_policy import load_policy


def names() -> tuple[str, ...]:
    """Return the names of the library's policies, sorted."""
    found = (entry.name for entry in files(__name__).iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in found if name.endswith(".yaml")))


def source(name: str) -> str:
    """Return the YAML text of a library policy, comments included. Raises `ConfigError`."""
    if name not in names():
        hint = did_you_mean(name, names()) or f"the library has {', '.join(names())}"
        raise ConfigError(f"no library policy {quote(name)}; {hint}", name=name)
    return (files(__name__) / f"{name}.yaml").read_text(encoding="utf-8")


def load(name: str) -> Policy:
    """Return a library policy in its typed form. Raises `ConfigError`."""
    return load_policy(source(name), name=f"{name}.yaml")
