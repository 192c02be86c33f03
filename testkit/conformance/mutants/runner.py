"""Historic bugs as mutants: each is injected into an engine, and the kit must fail in a case named beforehand.

A kit that passes everything proves nothing. `FAULTS` lists what went wrong in real engines and caches. A mutant is one
of these faults, patched into one engine for a while. An adapter adds its own mutants (its own look-up, its own free
list) to those of governance. Where a fault cannot exist in its engine, it gives the reason. `kill` runs the named
cases.

1. An engine without a mutant passes; a mutant that no named case kills is a survivor, and a survivor is a failure.
2. A mutant whose patch no longer applies raises, rather than passing as killed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

from kvcustody.errors import ConfigError
from kvcustody.integrations.vllm.conformance_record import FAIL, SKIP
from kvcustody.testkit.conformance.cases import BY_NAME
from kvcustody.testkit.conformance.engine_protocol import EngineFactory
from kvcustody.testkit.conformance.kit import SEED, capabilities_of, judge
from kvcustody.testkit.conformance.mutants.catalogue import FAULTS

Patch = Callable[[], AbstractContextManager[None]]


class Mutant(NamedTuple):
    """One fault of `FAULTS` in one engine; `patch` injects it while its context is open."""

    fault: str
    patch: Patch


class Death(NamedTuple):
    """How a mutant ended: the failed case and its finding, or empty where it survived."""

    fault: str
    case: str
    reason: str

    @property
    def killed(self) -> bool:
        """Whether a named case failed."""
        return bool(self.case)


def kill(factory: EngineFactory, mutant: Mutant, *, seed: int = SEED) -> Death:
    """Run the fault's cases in order until one fails; skip cases that the engine cannot run."""
    fault = FAULTS.get(mutant.fault)
    if fault is None:
        raise ConfigError(f"`{mutant.fault}` is no fault of the catalogue", fault=mutant.fault)
    capabilities = capabilities_of(factory)
    ran = False
    with mutant.patch():
        for name in fault.cases:
            verdict = judge(factory, BY_NAME[name], capabilities, seed)
            ran = ran or verdict.verdict != SKIP
            if verdict.verdict == FAIL:
                return Death(mutant.fault, name, verdict.reason)
    if not ran:
        raise ConfigError(f"no case for fault `{mutant.fault}` can run on `{capabilities.engine}`", fault=mutant.fault)
    return Death(mutant.fault, "", "")


def kill_all(factory: EngineFactory, mutants: Iterable[Mutant], *, seed: int = SEED) -> list[Death]:
    """Run every mutant; return the deaths in order."""
    return [kill(factory, mutant, seed=seed) for mutant in mutants]


def unaccounted(mutants: Iterable[Mutant], not_applicable: Mapping[str, str]) -> list[str]:
    """Return the catalogue's faults that an adapter neither injects nor explains as impossible in its engine."""
    told = {mutant.fault for mutant in mutants} | {name for name, why in not_applicable.items() if why}
    return [name for name in FAULTS if name not in told]


# -- patches -----------------------------------------------------------------------------------------------------------


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace `owner.name` with `make(the original)` within the block. `owner`: a class or a module that has the
    name.
    """
    original = vars(owner)[name] if name in vars(owner) else _inherited(owner, name)
    own = name in vars(owner)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


def _inherited(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        raise ConfigError(
            f"`{getattr(owner, '__name__', owner)}` has no `{name}` any more: bring the mutant up to date"
        )
    return getattr(owner, name)


def patch(owner: Any, name: str, make: Callable[[Any], Any]) -> Patch:
    """Return `replaced` as a mutant's patch."""
    return lambda: replaced(owner, name, make)


def constant(owner: Any, name: str, value: Any) -> Patch:
    """Return a method that only returns `value`."""
    return patch(owner, name, lambda original: lambda *args, **more: value)


def without(*names: str) -> Callable[[Any], Any]:
    """Return a constructor that then drops these collections of the object."""

    def make(original: Any) -> Any:
        def init(self: Any, *args: Any, **more: Any) -> None:
            original(self, *args, **more)
            for name in names:
                getattr(self, name).clear()

        return init

    return make


def together(*patches: Patch) -> Patch:
    """Return several patches as one."""

    @contextmanager
    def both() -> Iterator[None]:
        with ExitStack() as stack:
            for one in patches:
                stack.enter_context(one())
            yield

    return both
