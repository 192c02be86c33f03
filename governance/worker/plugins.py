"""The extensions that a worker's settings name, loaded before anything else is opened.

Each is on record with the worker: `software` is the text of its `worker-started` leaf, with every extension's
distribution and version behind kvcustody's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

from kvcustody._version import __version__
from kvcustody.allocator.prefix.eviction_policy import EvictionPolicy
from kvcustody.errors import ConfigError
from kvcustody.extensions import (
    EVICTION_POLICIES,
    KEY_WRAPPING,
    PREFIX,
    TIERS,
    Extension,
    load,
    names_extension,
)
from kvcustody.governance.erasure.tier_protocol import CopyStore
from kvcustody.governance.keys.root_key_wrapping import WrappingPort, open_wrapping
from kvcustody.governance.settings import Settings


class WorkerPlugins(NamedTuple):
    """What the settings name. Nothing here was made yet: the methods make it when the worker is ready for it."""

    wrapping: Extension | None
    eviction: Extension | None
    tiers: tuple[Extension, ...]

    def open_tiers(self, settings: Settings, ours: Sequence[str] = ()) -> list[CopyStore]:
        """The tiers, each once; raises `ConfigError` for two of one name, `ours` among them."""
        made = [cast(CopyStore, tier.make(CopyStore, settings)) for tier in self.tiers]
        names = [*ours, *(tier.name for tier in made)]
        if len(set(names)) < len(names):
            raise ConfigError(f"setting `tiers`: two tiers are named `{'`, `'.join(sorted(names))}`")
        return made

    def eviction_order(self) -> Callable[[], EvictionPolicy] | None:
        """Makes the order of one account's victims; None where the policy document decides."""
        if self.eviction is None:
            return None
        extension = self.eviction

        def make() -> EvictionPolicy:
            return cast(EvictionPolicy, extension.make(EvictionPolicy))

        make()  # what it lacks is said at the start, not at the first eviction
        return make


def load_plugins(settings: Settings) -> WorkerPlugins:
    """Load what the settings name; raises `ConfigError` that says which extension and why."""
    source, eviction = settings.root_key_source, settings.eviction_policy
    names = [name for part in settings.tiers.split(",") if (name := part.strip())]
    bare = [name for name in names if not names_extension(name)]
    if bare:
        raise ConfigError(f"setting `tiers`: `{bare[0]}` is not an extension; write `plugin:{bare[0]}`", name=bare[0])
    return WorkerPlugins(
        load(KEY_WRAPPING, source) if names_extension(source) else None,
        load(EVICTION_POLICIES, eviction) if names_extension(eviction) else None,
        tuple(load(TIERS, name) for name in names),
    )


def open_root_key(settings: Settings) -> WrappingPort:
    """The holder of the root key that the settings name."""
    source = settings.root_key_source
    if source == "key-service":
        source = PREFIX + source
    if names_extension(source):
        return cast(WrappingPort, load(KEY_WRAPPING, source).make(WrappingPort, settings))
    return open_wrapping(source, settings.root_key_path, strict=settings.strict)


def software(settings: Settings) -> str:
    """What runs, for the record: `kvcustody 0.1.0`, then every extension that the settings name."""
    loaded = load_plugins(settings)
    extensions = [loaded.wrapping, loaded.eviction, *loaded.tiers]
    return " + ".join([f"kvcustody {__version__}", *(str(each) for each in extensions if each is not None)])
