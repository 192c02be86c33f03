"""A real router is given the wrong worker of a placement group: does the governed engine compute the prompt?

    python benchmarks/fleet/routers/wrong_route.py smg --json benchmarks/results/wrong-route-smg.json

1. `acme` is dedicated to the group `g0`. The router of `g0` is started over a worker of `g1`, by mistake: the door's
   token and header are right, and every request of `acme` reaches that worker. It is a governed pool with real K/V, in
   a process of its own (`integrations.fleet_worker`), with a ledger of its own.
2. Rows: the worker's own door knows its group; its door was told the router's group, and the engine alone knows; and
   the control, in which both were told the router's group.
3. What was computed is what the worker's ledger has: blocks handed out, and tokens of requests that it opened.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from sqlalchemy import distinct, func, select

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "harness"))

from bench import Bench
from router_probes import Prompts
from running_router import CHAT, POLICY, environment_of, version_of

from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.leaf_tables import residencies
from kvcustody.audit.store.schema.ledger import events
from kvcustody.governance.credentials.api_key_file import add_key
from kvcustody.lab.fleet.local_processes import LocalProcesses, free_ports
from kvcustody.lab.fleet.router_programs import ROUTERS, router_command

TENANT = "acme"
DEMANDS = f"placement: [{{id: own, groups: [g0], tenants: [{TENANT}], dedicated: true}}]\n"
IDENTITY = "schema: kvcustody/identity@1\n"
OURS = (sys.executable, "-m", "kvcustody.console.main", "door")


class Defence(NamedTuple):
    """Which group the worker's own door says that it is in, and which one the engine says."""

    name: str
    door: str
    engine: str


ROWS = (
    Defence("its door", "g1", "g1"),
    Defence("the engine alone", "g0", "g1"),
    Defence("control: neither", "g0", "g0"),
)


def settings(folder: Path, **more: Any) -> dict[str, str]:
    """The environment of a worker or door with its files in a folder."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("KVCUSTODY_")}
    stated = {"scope_token_key_path": folder.parent / "scope.key", "log_level": "error"} | more
    return own | {f"KVCUSTODY_{name.upper()}": str(value) for name, value in stated.items()}


def measure(router: str, defence: Defence, count: int) -> dict[str, Any]:
    """What became of `count` requests of the tenant."""
    prompts = Prompts(19)
    with tempfile.TemporaryDirectory() as place, LocalProcesses(Path(place) / "logs") as processes:
        folder = Path(place)
        worker, door = folder / "worker", folder / "door"
        worker.mkdir()
        door.mkdir()
        policy = POLICY.format(scope="subject", affinity="private", listed=f", {TENANT}: {{}}") + DEMANDS
        (folder / "policy.yaml").write_text(policy)
        key = add_key(door / "keys.yaml", {"name": TENANT, "tenant": TENANT})
        (door / "identity.yaml").write_text(f"{IDENTITY}api_keys: {{path: keys.yaml}}\n")
        at, routed, metrics, listen, about = free_ports(5)
        made = [*OURS, "key", "door-1.example", "--key", str(door / "door.key")]
        outside = settings(door, identity_path=door / "identity.yaml")
        said = subprocess.run(made, env=outside, check=True, stdout=subprocess.PIPE, text=True).stdout
        (worker / "doors.vkeys").write_text(said)
        (worker / "identity.yaml").write_text(f"{IDENTITY}doors: {{keys: doors.vkeys, group: {defence.door}}}\n")
        inside = settings(
            worker,
            policy_path=folder / "policy.yaml",
            database_url=f"sqlite:///{worker / 'ledger.db'}",
            spill_path=worker / "spill",
            root_key_path=worker / "root.key",
            keyring_path=worker / "keys.json",
            identity_path=worker / "identity.yaml",
            placement_group=defence.engine,
        )
        server = [sys.executable, "-m", "kvcustody.integrations.fleet_worker.server", "--port", str(at)]
        processes.start("worker", [*server, "--blocks", "512"], environment=inside)
        processes.wait_for("worker", f"http://127.0.0.1:{at}/health")
        program = environment_of(router) / "bin" / ROUTERS[router].program
        command = router_command(
            router, program, [f"http://127.0.0.1:{at}"], port=routed, metrics_port=metrics, is_bounded=True
        )
        processes.start(router, command)
        processes.wait_for(router, f"http://127.0.0.1:{routed}/v1/models")
        (door / "placement.yaml").write_text(
            "schema: kvcustody/placement@1\ngroups:\n"
            f"  g0: {{router: 'http://127.0.0.1:{routed}'}}\n  g1: {{router: 'http://127.0.0.1:{at}'}}\n"
        )
        proxy = [*OURS, "proxy", "--listen", f"127.0.0.1:{listen}", "--about", f"127.0.0.1:{about}"]
        proxy += ["--key", str(door / "door.key"), "--placement", str(door / "placement.yaml")]
        processes.start("door", [*proxy, "--policy", str(folder / "policy.yaml")], environment=outside)
        processes.wait_for("door", f"http://127.0.0.1:{about}/ready")
        statuses = Counter[str]()
        with httpx.Client(timeout=30, headers={"authorization": f"Bearer {key}"}) as client:
            for number in range(count):
                message = {"role": "user", "content": f"{number} {prompts.text(1500)}"}
                body = {"model": "toy", "messages": [message], "max_tokens": 2}
                statuses[str(client.post(f"http://127.0.0.1:{listen}{CHAT}", json=body).status_code)] += 1
        for name in ("door", router, "worker"):  # in order: the worker's last leaves are written
            processes.end(name)
        return {"defence": defence.name, "requests": count, "statuses": dict(statuses), **recorded(worker)}


def recorded(worker: Path) -> dict[str, Any]:
    """What the worker's ledger has (rule 3), and its refusals by reason."""
    store = open_store(worker / "ledger.db")
    refused = Counter[str]()
    with store.connect() as connection:
        for text in connection.scalars(select(events.c.leaf).where(events.c.kind == "attempts-refused")):
            leaf = json.loads(text)
            refused[leaf["reason"]] += leaf["attempts"]
        requests = select(func.count(distinct(residencies.c.residency)), func.sum(residencies.c.written_blocks))
        opened, blocks = connection.execute(requests).one()
    store.dispose()
    return {"requests_opened": opened, "blocks_handed_out": blocks or 0, "refusals_on_record": dict(refused)}


def main() -> None:
    """Print one JSON object; exit status 1 where a prompt was computed, or the control is void."""
    bench = Bench(__doc__, "httpx", "starlette")
    bench.add("router", choices=tuple(ROUTERS))
    bench.add("--requests", type=int, default=200)
    options = bench.parse()
    rows = [measure(options.router, row, options.requests) for row in ROWS]
    version = version_of(environment_of(options.router), options.router)
    bench.keep({"router": options.router, "version": version, "rows": rows}, show=True)
    *defended, control = rows
    if any(row["requests_opened"] or row["statuses"].get("200") for row in defended):
        raise SystemExit("a prompt was computed by a worker that may not serve it")
    for row, reason in zip(defended, ("invalid", "misplaced"), strict=True):
        if row["refusals_on_record"].get(reason, 0) < options.requests:  # a router may ask for a rendering first
            raise SystemExit("a refusal is not on record")
    if control["requests_opened"] != options.requests or control["statuses"] != {"200": options.requests}:
        raise SystemExit("void: with the defence off, the worker does not serve")


if __name__ == "__main__":
    main()
