"""A governed vLLM beside LMCache's server: one deployment for both, and what the tests ask of them."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from typer.testing import CliRunner

from kvcustody.console.main import app
from kvcustody.errors import ConfigError
from kvcustody.integrations.vllm.conformance_record import check_record, digest_of, load_subject
from standins.engines.vllm.deployment import Deployment
from standins.integrations.chunk_site import POLICY

CLEAR = POLICY.replace("internal: {tiers: [host, nvme], encrypt: required}", "internal: {tiers: [host], encrypt: none}")

SERVER = "lmcache-0"  # its worker's name
KIT = "kvcustody.testkit.lmcache.conformance:engine"
SUBJECT = "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_mp_connector:LMCacheMPConnector"
KEPT_RECORD = Path(__file__).parents[5] / "benchmarks/results/conformance-kit/records/LMCacheMPConnector.json"


@dataclass
class Site(Deployment):
    """A deployment whose engine may have LMCache's connector beside ours; the server has the same settings."""

    policy: str = POLICY
    more: dict[str, str] = field(default_factory=dict)

    def environment(self, worker: str = "engine-0") -> dict[str, str]:
        """Of either process."""
        salts = {"KVCUSTODY_SCOPE_SALTS_PATH": str(self.folder / "salts")}
        return {**super().environment(worker), **salts, **self.more}

    def of_server(self) -> dict[str, str]:
        """The server's: a worker of its own, with a tier."""
        tier = {
            "KVCUSTODY_NVME_TIER_PATH": str(self.folder / "tier"),
            "KVCUSTODY_NVME_TIER_BYTES": str(256 << 20),
            "KVCUSTODY_TIER_TIMEOUT_MS": "5000",
            "KVCUSTODY_SPILL_PATH": str(self.folder / "lmcache-spill"),
        }
        return {**self.environment(SERVER), **tier}


@lru_cache
def _record() -> bytes:
    """Of the kit over the connector that is installed: the one kept, or one made now (two minutes)."""
    for kept in sorted(KEPT_RECORD.parent.glob(f"{KEPT_RECORD.stem}*.json")):  # one a release
        data = kept.read_bytes()
        with suppress(ConfigError):
            check_record(str(kept), digest_of(data), load_subject(SUBJECT))
            return data
    with TemporaryDirectory() as folder:
        made = Path(folder, "lmcache.json")
        kit = ["conformance", "--engine", KIT, "--subject", SUBJECT, "--record", str(made)]
        result = CliRunner().invoke(app, kit)
        assert result.exit_code == 0, result.output[-3000:]
        return made.read_bytes()


def vouched(folder: Path) -> str:
    """The setting that lets LMCache's connector run beside ours, with the kit's record of it in `folder`."""
    path = folder / "lmcache.json"
    path.write_bytes(_record())
    return f"LMCacheMPConnector={path}#{digest_of(_record())}"


def transfer(*connectors: dict[str, Any]) -> Any:
    """vLLM's configuration of several connectors."""
    from vllm.config import KVTransferConfig

    extra = {"connectors": list(connectors)}
    return KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=extra)


def run(*words: str) -> dict[str, Any]:
    """What a command of ours says, as JSON."""
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def freed_bytes(status: Any) -> int:
    """What our module says that the first tier has zeroed, wherever LMCache shows it."""
    if isinstance(status, dict):
        mine = status.get("kvcustody_first_tier")
        return mine["zeroed_bytes"] if mine else sum(map(freed_bytes, status.values()))
    return sum(map(freed_bytes, status)) if isinstance(status, list) else 0
