"""The questions about a router, put to SMG behind our door.

python -m kvcustody.testkit.conform.scripts.ours.kvcustody_router CASE   # needs: kvcustody[door], and smg on PATH

CASE: placement-oracle, forged-salt, chosen-worker, kept-phrase or open-administration.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcustody.audit.tlog.signing_key import create_signing_key
from kvcustody.governance.credentials.api_key_file import add_key
from kvcustody.testkit.conform.scripts.layers import routers as asked

POLICY = """\
schema: kvcustody/policy@1
name: probed
profile: shared
scope: subject
classifications: [low]
classify: [{tenant: "*", as: low}]
tenants: {default: {}}
retention: {low: {idle: 1h, absolute: 8h, active_max: 2h}}
scrub: {default: {within: 1s, verify: none}}
offload: {low: never}
audit:
  on_outage: {decisions: deny, lifecycle: spill, own_hits: aggregate}
"""


def with_door(start: Callable[..., int], folder: Path, router: str, ports: list[int]) -> dict[str, dict[str, str]]:
    """Start our door as a proxy in front of the router; return clients' headers."""
    keys = {tenant: add_key(folder / "keys.yaml", {"name": tenant, "tenant": tenant}) for tenant in "ab"}
    (folder / "identity.yaml").write_text(
        "schema: kvcustody/identity@1\napi_keys: {path: keys.yaml, asserted: {subject: X-KVCustody-Subject}}\n"
    )
    (folder / "policy.yaml").write_text(POLICY)
    environment = os.environ | {
        "KVCUSTODY_IDENTITY_PATH": str(folder / "identity.yaml"),
        "KVCUSTODY_SCOPE_TOKEN_KEY_PATH": str(folder / "scope.key"),
        "KVCUSTODY_LOG_LEVEL": "error",
    }
    key = folder / "door.key"
    create_signing_key(key, "door-1.example")
    places = [f"127.0.0.1:{port}" for port in ports]
    words = ["--listen", places[0], "--about", places[1], "--key", str(key), "--router", router]
    ours = [sys.executable, "-m", "kvcustody.console.main", "door", "proxy"]
    start([*ours, *words, "--policy", str(folder / "policy.yaml")], environment)
    subject = {"x-kvcustody-subject": "s"}
    return {tenant: {"authorization": f"Bearer {given}", **subject} for tenant, given in keys.items()}


def main(case: str) -> dict[str, Any]:
    """Return what was seen."""
    return asked.main(case, "smg", with_door)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
