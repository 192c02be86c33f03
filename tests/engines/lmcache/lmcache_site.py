"""A governed vLLM beside LMCache's server: one deployment for both, and what the tests ask of them."""

from __future__ import annotations

import contextlib
import io
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chunk_site import POLICY
from deployment import Deployment
from typer.testing import CliRunner

from kvcustody.console.main import app

CLEAR = POLICY.replace(
    "internal: {tiers: [host, nvme], encrypt: required}", "internal: {tiers: [host], encrypt: none}"
)

PAGE = Path(__file__).resolve().parents[3] / "docs" / "start" / "lmcache.md"
SERVER = "lmcache-0"  # its worker's name


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


def vouched(folder: Path) -> str:
    """What LMCache's page has an operator sign off: the setting that lets its connector run beside ours."""
    (source,) = re.findall(
        r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    told = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(told):
        exec(compile(source, str(PAGE), "exec"), {})
    return told.getvalue().strip()


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
