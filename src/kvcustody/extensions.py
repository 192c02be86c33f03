"""Where other distributions plug in: every extension point of kvcustody, an entry-point group each.

An extension is a factory behind an entry point of one of the groups in `POINTS`. It is loaded when a setting or an
option names it, as `plugin:NAME`, and never because it is installed. `load` returns it with its distribution and
version, which go on record with the worker that uses it:

    [project.entry-points."kvcustody.eviction_policies"]
    two-queue = "acme_kv.eviction:TwoQueue"

    KVCUSTODY_EVICTION_POLICY=plugin:two-queue

A name that is not installed, that two distributions claim, that cannot be imported or that does not give what its
contract asks for is a `ConfigError` that names the extension and its distribution. docs/build/extending.md has an
example of each.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

from kvcustody.errors import ConfigError

PREFIX = "plugin:"


class ExtensionPoint(NamedTuple):
    """A group of entry points: who names one, what its factory is given, and what the factory has to give."""

    group: str
    named_by: str
    given: str
    contract: str


COMMANDS = ExtensionPoint(
    "kvcustody.commands",
    "the command line: every command that is installed is offered, and loaded when it is run",
    "nothing: it is a typer app or a function",
    "typer.Typer",
)
TIERS = ExtensionPoint(
    "kvcustody.tiers",
    "the setting `tiers`",
    "the settings",
    "kvcustody.governance.erasure.tier_protocol.CopyStore",
)
ENGINES = ExtensionPoint(
    "kvcustody.engines",
    "`kvcustody conformance --engine`",
    "what the conformance kit gives an engine: a deployment",
    "kvcustody.testkit.conformance.engine_protocol.EngineUnderTest",
)
EVICTION_POLICIES = ExtensionPoint(
    "kvcustody.eviction_policies",
    "the setting `eviction_policy`",
    "nothing; it is called once for each pool and account",
    "kvcustody.allocator.prefix.eviction_policy.EvictionPolicy",
)
KEY_WRAPPING = ExtensionPoint(
    "kvcustody.key_wrapping",
    "the setting `root_key_source`",
    "the settings",
    "kvcustody.governance.keys.root_key_wrapping.WrappingPort",
)
SIGNERS = ExtensionPoint(
    "kvcustody.signers",
    "`--signing-key` of `kvcustody policy propose`, `approve`, `consent` and the others that sign",
    "nothing",
    "kvcustody.policies.bundle.trust.Signer",
)
SIEM_FORMATS = ExtensionPoint(
    "kvcustody.siem_formats",
    "`--shape` of `kvcustody audit ship` and `push`, and `shape` of a webhook in the service's settings",
    "nothing",
    "kvcustody.audit.siem.formats.LeafShape",
)
POINTS = (COMMANDS, TIERS, ENGINES, EVICTION_POLICIES, KEY_WRAPPING, SIGNERS, SIEM_FORMATS)


class Extension(NamedTuple):
    """A loaded extension: its factory, and which distribution in which version it came from."""

    point: ExtensionPoint
    name: str
    factory: Callable[..., Any]
    distribution: str
    version: str

    def __str__(self) -> str:
        """As it goes on record: `acme-kv 1.2 (eviction_policies: two-queue)`."""
        return f"{self.distribution} {self.version} ({self.point.group.rpartition('.')[2]}: {self.name})"

    def make(self, contract: type[Any], *given: object) -> Any:
        """What the factory gives, once it has every public name of `contract`; raises `ConfigError`."""
        try:
            extension = self.factory(*given)
        except ConfigError:
            raise
        except Exception as error:
            raise self._unusable(f"its factory failed: {type(error).__name__}: {error}") from error
        missing = sorted(name for name in _public(contract) if not hasattr(extension, name))
        if missing:
            raise self._unusable(f"what it gives has no `{'`, `'.join(missing)}` ({self.point.contract})")
        return extension

    def _unusable(self, reason: str) -> ConfigError:
        return ConfigError(f"extension `{PREFIX}{self.name}` of {self}: {reason}", extension=self.name)


def names_extension(text: str) -> bool:
    """Whether a setting's value names an extension rather than something of ours."""
    return text.startswith(PREFIX)


def load(point: ExtensionPoint, text: str) -> Extension:
    """The extension that `text`, a name with or without `plugin:`, means at `point`; raises `ConfigError`."""
    name = text.removeprefix(PREFIX)
    entries = [entry for entry in entry_points(group=point.group) if entry.name == name]
    origins = sorted({_origin(entry) for entry in entries})
    if not entries:
        raise ConfigError(
            f"no extension `{name}` is installed for `{point.group}`{_suggestion(point, name)}",
            extension=name,
        )
    if len(origins) > 1:
        raise ConfigError(
            f"extension `{name}` of `{point.group}` is claimed by {' and '.join(map(str, origins))}; remove one",
            extension=name,
        )
    (distribution, version) = origins[0]
    try:
        factory = entries[0].load()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"extension `{name}` of {distribution} {version} cannot be loaded: {reason}", extension=name
        ) from error
    return Extension(point, name, factory, distribution, version)


def _origin(entry: EntryPoint) -> tuple[str, str]:
    return ("unknown", "unknown") if entry.dist is None else (entry.dist.name, entry.dist.version)


def _suggestion(point: ExtensionPoint, name: str) -> str:
    installed = sorted({entry.name for entry in entry_points(group=point.group)})
    close = difflib.get_close_matches(name, installed, n=1)
    if close:
        return f"; did you mean `{PREFIX}{close[0]}`?"
    return f"; installed: {', '.join(installed)}" if installed else "; none is installed"


def _public(contract: type[Any]) -> set[str]:
    own = set(vars(contract)) | set(getattr(contract, "__annotations__", {}))
    return {name for name in own if not name.startswith("_")}
