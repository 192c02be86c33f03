"""Two governed vLLM engines of one deployment: one prefills, the other decodes what it is handed."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcustody.audit.tlog.signing_key import create_signing_key
from standins.certificates import Authority
from standins.engines.vllm.deployment import Deployment
from standins.engines.vllm.local_engine import Answer, LocalEngine
from standins.engines.vllm.tier_engines import TIER_POLICY, options

PREFILL, DECODE, OTHER = "prefill-1", "decode-1", "decode-2"


@dataclass
class WorkerDeployment(Deployment):
    """The deployment as one of its workers has it."""

    worker: str = ""
    address: str = ""
    leases: int = 30

    def environment(self, worker: str = "") -> dict[str, str]:
        """The settings of this worker's processes."""
        return super().environment(worker or self.worker) | {
            "KVCUSTODY_SPILL_PATH": str(self.folder / f"spill-{self.worker}"),
            "KVCUSTODY_HANDOVER_ADDRESS": self.address,
            "KVCUSTODY_HANDOVER_PEERS_PATH": str(self.folder / "peers.yaml"),
            "KVCUSTODY_HANDOVER_KEY_PATH": str(self.folder / f"{self.worker}.key"),
            "KVCUSTODY_HANDOVER_LEASE_SECONDS": str(self.leases),
            "KVCUSTODY_HANDOVER_CERTIFICATE_PATH": str(self.folder / f"{self.worker}.crt"),
            "KVCUSTODY_HANDOVER_CERTIFICATE_KEY_PATH": str(self.folder / f"{self.worker}.tls"),
            "KVCUSTODY_HANDOVER_CA_PATH": str(self.folder / "fleet.pem"),
        }


def free_port() -> int:
    """A port that nobody has."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        return int(held.getsockname()[1])


def two_workers(folder: Path) -> dict[str, WorkerDeployment]:
    """Deployments of both workers, and of a third that has a key and no engine; they hand over by TLS."""
    workers: dict[str, WorkerDeployment] = {}
    folder.mkdir(parents=True, exist_ok=True)
    fleet = Authority(folder, "fleet")
    lines = ["schema: kvcustody/handover-peers@1", "workers:"]
    for worker in (PREFILL, DECODE, OTHER):
        address = f"127.0.0.1:{free_port()}"
        workers[worker] = WorkerDeployment(folder, policy=TIER_POLICY, worker=worker, address=address)
        key = create_signing_key(folder / f"{worker}.key", worker)
        fleet.issue(worker, both=True)
        lines.append(f"  {worker}: {{address: '{address}', key: '{key.verifier}'}}")
    (folder / "peers.yaml").write_text("\n".join(lines) + "\n")
    return workers


class Handing:
    """A prefill engine and a decode engine, and what a proxy between them does."""

    def __init__(self, prefill: LocalEngine, decode: LocalEngine) -> None:
        self.prefill, self.decode = prefill, decode

    def prefilled(self, tokens: list[int], *, tenant: str, peer: str = DECODE, subject: str = "s") -> str:
        """Prefill a prompt; the ticket of the answer, empty where it has none."""
        carried = {"do_remote_decode": True, "kvcustody_peer": peer}
        request_id = self.prefill.submit(tokens, tenant=tenant, subject=subject, max_tokens=1, carried_on=carried)
        self.prefill.finish()
        params = self.prefill.transfer_params.pop(request_id, None) or {}
        return str(params.get("kvcustody_ticket", ""))

    def decoded(self, tokens: list[int], ticket: str, *, tenant: str, subject: str = "s", **named: Any) -> Answer:
        """Decode with a ticket."""
        carried = {"kvcustody_ticket": ticket}
        return self.decode.ask(tokens, tenant=tenant, subject=subject, carried_on=carried, **named)


def handing(start: Any, folder: Path) -> Handing:
    """Both engines, started."""
    workers = two_workers(folder)
    return Handing(*(start(deployment=workers[worker], **options()) for worker in (PREFILL, DECODE)))
