"""Connectors beside ours: which of them may run, and whether their copies are sealed.

1. A connector beside ours is refused unless the settings name a passed conformance run of its very code: an external
   tier keeps blocks out of custody, and some hash tokens without any scope.
2. A record is of a connector's code, which does not say what becomes of the bytes behind it. They are taken to be in
   clear unless whoever takes them shows that it seals (`seal_notice`): that is asked again while the engine serves.
   While they are, a request that must be encrypted off the device is refused, and so is the start of an isolating
   profile.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcustody.clock import Clock
from kvcustody.errors import ConfigError
from kvcustody.governance.keys.shred_keys import ShredKeys
from kvcustody.governance.tiers.seal.seal_notice import is_sealing
from kvcustody.integrations.vllm.conformance_record import check_record, load_subject
from kvcustody.logger import get_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

NAME = "KVCustody"
_MULTI = "MultiConnector"
_LMCACHE, _LMCACHE_PORT = "LMCacheMPConnector", 5555  # and the port that it takes where none is named
_VETOED = {  # whatever a record says
    "LMCacheConnectorV1": "stores blocks without their salt, so one tenant can get another's; use LMCache's "
    "server and its "
    "`LMCacheMPConnector` (docs/reference/engines/lmcache.md)",
}
_HERE = ("localhost", "127.0.0.1", "::1")
_LOOK_US = 1_000_000  # between two looks at who seals
_log = get_logger(__name__)


def has_foreign_connectors(config: VllmConfig) -> bool:
    """Return whether another connector runs beside ours."""
    return bool(_foreign_connectors(config))


def _foreign_connectors(config: VllmConfig) -> list[Mapping[str, Any]]:
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_connector != _MULTI:
        return []
    children = transfer.kv_connector_extra_config.get("connectors", ())
    return [child for child in children if child.get("kv_connector") != NAME]


def refuse_foreign_connectors(config: VllmConfig, allowed: str) -> None:
    """Raise `ConfigError` with the first connector that may not run beside ours, and the reason (rule 2).

    allowed: `NAME=RECORD#DIGEST`, separated by commas: the record of a passed run of the conformance kit.
    config: the engine's, not the copy that a connector among several is given, which names that connector alone.
    """
    foreign = _foreign_connectors(config)
    if not foreign:
        return
    if config.kv_transfer_config.kv_connector_extra_config["connectors"][0] in foreign:
        raise ConfigError(
            f"`{NAME}` is not the first of the connectors: it takes tokens and hints from a request before another "
            "sees them; name it first",
            connector=NAME,
        )
    records = _records(allowed)
    for child in foreign:
        name = str(child.get("kv_connector"))
        if name in _VETOED:
            raise ConfigError(f"connector `{name}` {_VETOED[name]}", connector=name)
        if name not in records:
            raise ConfigError(
                f"connector `{name}` stores KV blocks outside this engine, beyond deadlines, scrubs and "
                "scopes; remove it, or list the record of its passed conformance run in "
                "`vllm_connectors_allowed`",
                connector=name,
            )
        check_record(*records[name], _connector_class(child))


def _records(allowed: str) -> dict[str, tuple[str, str]]:
    records = {}
    for entry in filter(None, map(str.strip, allowed.split(","))):
        name, _, where = entry.partition("=")
        path, _, digest = where.rpartition("#")
        if not (name and path and digest):
            raise ConfigError(
                f"`vllm_connectors_allowed`: `{entry}` is not `NAME=RECORD#DIGEST`; the conformance kit writes the "
                "record and prints its digest (`--record`)",
                entry=entry,
            )
        records[name.strip()] = (path.strip(), digest.strip())
    return records


def _connector_class(child: Mapping[str, Any]) -> type:
    """Return the class that vLLM would load for this entry in `connectors`."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    name, module = str(child.get("kv_connector")), child.get("kv_connector_module_path")
    try:
        if module is not None:
            return load_subject(f"{module}:{name}")
        found: type = KVConnectorFactory.get_connector_class_by_name(name)
    except ValueError as error:
        raise ConfigError(f"connector `{name}`: {error}", connector=name) from error
    return found


class CopiesBeside:
    """Whether all copies by connectors beside ours are sealed, as far as they show now (rule 2)."""

    def __init__(self, config: VllmConfig, salts_path: Path | None, shred: ShredKeys, clock: Clock) -> None:
        self._unsealed: Callable[[], str] = lambda: _unsealed(_foreign_connectors(config), salts_path, shred)
        self._clock = clock
        self._looked_us = 0
        self.clear = ""  # who keeps copies in clear; "": nobody
        self._look()

    def __call__(self) -> bool:
        """Return True where they are sealed, or there are none."""
        if self._clock.now_us() - self._looked_us >= _LOOK_US:
            self._look()
        return not self.clear

    def _look(self) -> None:
        before, self.clear = self.clear, self._unsealed()
        self._looked_us = self._clock.now_us()
        if self.clear and self.clear != before:
            _log.error("copies would be stored unencrypted", where=self.clear)


def _unsealed(foreign: list[Mapping[str, Any]], salts_path: Path | None, shred: ShredKeys) -> str:
    for child in foreign:
        name, extra = str(child.get("kv_connector")), child.get("kv_connector_extra_config") or {}
        host = str(extra.get("lmcache.mp.host", _HERE[0])).removeprefix("tcp://").strip("[]")
        port = int(extra.get("lmcache.mp.port", _LMCACHE_PORT))
        if name != _LMCACHE or host not in _HERE or salts_path is None:
            return f"connector `{name}`"
        if not is_sealing(salts_path, shred, port) and _listens(host, port):
            return f"connector `{name}`: LMCache's server at port {port}"
    return ""


def _listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=0.2):
            return True
    except OSError:
        return False
