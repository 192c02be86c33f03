"""A service as a process of its own, for tests that kill it: `service_process.py FOLDER [DATABASE_URL]`."""

from __future__ import annotations

import sys
from pathlib import Path

import orjson

from kvcustody.governance.api.http.server import serve
from kvcustody.governance.observability.logs import configure
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.service import open_service
from kvcustody.governance.service.settings import ServiceSettings


def main() -> None:
    folder = Path(sys.argv[1])
    database = sys.argv[2] if len(sys.argv) > 2 else f"sqlite:///{folder}/ledger.db"
    configure("error", "json")
    settings = ServiceSettings(
        database_url=database,
        subject_keys_url=f"sqlite:///{folder}/people.db",
        state_path=folder / "state",
        listen=f"unix:{folder}/api.sock",
        signing_key_path=folder / "signing.key",
        requests_per_second=1e6,
        requests_burst=1_000_000,
        shutdown_seconds=5,
    )
    with open_service(settings) as service:
        keys = folder / "keys.json"
        if not keys.exists():
            made = {}
            names = {"w1": Role.WORKER, "w2": Role.WORKER}
            for name, role in names.items():
                service.principals.enrol(name, [role], by="test")
                made[name] = service.principals.issue_key(name, days=1, by="test").key
            keys.write_bytes(orjson.dumps(made))
        serve(service, ready=lambda: print("ready", flush=True))


if __name__ == "__main__":
    main()
