"""A case of the kit: what it proves, what an engine needs for it, and the function that fails otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from kvcustody.errors import ConfigError
from kvcustody.integrations.conformance.engine_protocol import FEATURES

if TYPE_CHECKING:
    from kvcustody.integrations.conformance.bench import Bench


class Failed(AssertionError):  # noqa: N818 (the verdict's own word)
    """The engine does not do what the case demands."""


class Case(NamedTuple):
    """`name` is stable across releases; `proves` is one sentence; `needs` are features of `FEATURES`."""

    name: str
    proves: str
    needs: tuple[str, ...]
    run: Callable[[Bench], None]


def case(name: str, *needs: str) -> Callable[[Callable[[Bench], None]], Case]:
    """Make a case of a function; its docstring is what it proves."""
    unknown = set(needs) - set(FEATURES)
    if unknown:
        raise ConfigError(f"case `{name}` needs unknown features `{sorted(unknown)}`", case=name)

    def make(function: Callable[[Bench], None]) -> Case:
        return Case(name, " ".join((function.__doc__ or "").split()), needs, function)

    return make


def expect(holds: bool, message: str) -> None:
    """Raise `Failed` with `message` where it does not hold."""
    if not holds:
        raise Failed(message)


def expect_equal(got: object, wanted: object, what: str) -> None:
    """Raise `Failed` that shows both."""
    if got != wanted:
        raise Failed(f"{what}: `{got}`, wanted `{wanted}`")
