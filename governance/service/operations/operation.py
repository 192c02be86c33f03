"""The declaration of every API operation; an undeclared one is not served.

1. An operation names the actions of which a caller's roles must allow one, and whether for all tenants. Only health
   checks have none. An operation asks nothing more of its caller's roles by itself. One that hands leaves over
   (`exports`) is asked of the policy too, for people of a tenant.
2. A mutating POST has an idempotency key; PUT and DELETE are idempotent by what they mean.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvcustody.governance.service.access.caller import Caller, forbidden
from kvcustody.governance.service.access.roles import Permission, Reach


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation: its name is the `operationId`. `action` None: open to everybody, without a credential.

    `command` is the one command that asks it, without `kvcustody`: `audit query`.
    """

    name: str
    method: str
    path: str
    action: Permission | None
    tag: str
    command: str
    recorded: bool = False  # a read of the ledger: an event of its own for those whose reads are recorded
    exports: bool = False  # hands leaves over: asked as the action `export` (`service.fleet.exports`)
    keyed: bool = False  # needs an `Idempotency-Key`
    batch: bool = False  # takes a worker's batch: the larger limit
    also: tuple[Permission, ...] = ()  # other actions that allow it as well
    whole: bool = False  # of all tenants together: for those whose reach is not their own tenant alone
    at_workers: bool = False  # served to workers at their own address too
    pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        text = re.sub(r"\\\{([a-z_]+)\\\}", r"(?P<\1>[^/]+)", re.escape(self.path))
        object.__setattr__(self, "pattern", re.compile(text))
        assert self.keyed <= (self.method == "POST") and self.whole <= (self.action is not None)

    @property
    def title(self) -> str:
        """The name in words: `listEvents` is `List events`."""
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", self.name).lower()
        return words[0].upper() + words[1:]

    @property
    def needs(self) -> str:
        """The permissions that a caller needs, for the documentation."""
        if self.action is None:
            return "nothing"
        either = " or ".join(f"`{action.value}`" for action in (self.action, *self.also))
        return f"{either}, of all tenants" if self.whole else either

    def parameters(self, path: str) -> dict[str, str]:
        """Return the values in a request path for the names in this operation's path."""
        found = self.pattern.fullmatch(path)
        return {} if found is None else found.groupdict()


def check_permission(operation: Operation, caller: Caller) -> None:
    """Raise `forbidden` unless the caller's roles permit this operation."""
    if operation.action is None:
        return
    if not operation.whole:
        caller.must(operation.action, *operation.also)
    elif caller.reach(operation.action) is not Reach.ALL:
        raise forbidden(operation.action, least=Reach.ALL)


class Operations:
    """The table of all operations, by name and by request."""

    def __init__(self) -> None:
        self.by_name: dict[str, Operation] = {}
        self._commands: set[str] = set()
        self._literal: dict[tuple[str, str], Operation] = {}
        self._paths: dict[str, list[str]] = {}  # the methods of paths without parameters
        self._patterns: list[Operation] = []

    def add(self, operation: Operation) -> None:
        """Declare an operation; its name, its command, and its method with path must be unique."""
        place = (operation.method, operation.path)
        assert operation.name not in self.by_name and place not in self._literal
        assert operation.command not in self._commands, operation.command
        self._commands.add(operation.command)
        self.by_name[operation.name] = operation
        self._literal[place] = operation
        if "{" in operation.path:
            self._patterns.append(operation)
        else:
            self._paths.setdefault(operation.path, []).append(operation.method)

    def find(self, method: str, path: str) -> Operation | None:
        """Return the operation of a request; a path without parameters wins over one with."""
        if path in self._paths:
            return self._literal.get((method, path))
        for operation in self._patterns:
            if operation.method == method and operation.pattern.fullmatch(path):
                return operation
        return None

    def methods(self, path: str) -> list[str]:
        """Return a path's methods for `Allow`; HEAD where it has GET."""
        methods = set(self._paths.get(path, ()))
        if not methods:
            here: Iterable[Operation] = self._patterns
            methods = {operation.method for operation in here if operation.pattern.fullmatch(path)}
        return sorted(methods | {"HEAD"} if "GET" in methods else methods)

    def are_open(self, path: str) -> bool:
        """Whether every operation of a path is open to everybody."""
        served = [self._literal[method, path] for method in self._paths.get(path, ())]
        return bool(served) and all(operation.action is None for operation in served)
