"""A witness for `kvcustody up`, to show a witnessed ledger.

On the same machine it proves nothing: its name says so, and docs/concepts/ledger/trees.md says where a witness belongs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvcustody.audit.tlog.signed_note import KeyKind, VerifierKey
from kvcustody.audit.tlog.signing_key import create_signing_key, read_signing_key
from kvcustody.audit.tlog.witness.client import WitnessAddress
from kvcustody.audit.tlog.witness.cosign import Witness
from kvcustody.audit.tlog.witness.server import WitnessServer
from kvcustody.audit.tlog.witness.state import WitnessMemory
from kvcustody.audit.tlog.witness.submitter import WitnessSubmitter
from kvcustody.governance.service.service import Service

NAME = "same-machine.example"


@contextmanager
def witnessed(service: Service, folder: Path, ledger: VerifierKey) -> Iterator[None]:
    """Yield a witness that trusts this ledger; checkpoints are sent to it until the block ends."""
    folder.mkdir(mode=0o700, exist_ok=True)
    file, memory = folder / "witness.key", folder / "witness.db"
    key = read_signing_key(file) if file.exists() else create_signing_key(file, NAME, KeyKind.COSIGNATURE)
    kept = WitnessMemory(memory, create=not memory.exists())
    kept.trust([ledger])
    server = WitnessServer(Witness(key, kept, lambda: int(time.time())), "127.0.0.1:0")
    server.start()
    submitter = WitnessSubmitter(service.engine, [WitnessAddress(f"http://{server.address}", key.verifier)])
    submitter.start()
    try:
        yield
    finally:
        submitter.close()
        server.close()
