"""How long an export and its two verifications take: `python benchmarks/evidence/exports.py [LEAVES] [--json FILE]`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcustody.audit.exports.export_writer import write_export
from kvcustody.audit.exports.ledger_source import LedgerSource
from kvcustody.audit.kinds import ResidencyReleased
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.audit.verify.verify_export import verify_export
from kvcustody.audit.write.event_writer import EventWriter
from kvcustody.clock import SystemClock
from kvcustody.migrations.upgrade import upgrade

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from bench import Bench

KEY = SigningKey.generate("ledger.example/benchmark")


def measure(leaves: int, folder: Path) -> dict[str, Any]:
    engine = open_store(folder / "ledger.db")
    upgrade(engine)
    fill(engine, leaves, folder)
    place, vkey = folder / "export", str(KEY.verifier)
    found: dict[str, Any] = {"leaves": leaves}
    found["export"] = timed(lambda: write_export(place, LedgerSource(engine), made_at_us=1))
    found["verify"] = timed(lambda: check(verify_export(place, [vkey]).ok))
    program = [sys.executable, "-I", str(place / "verify_kvcustody.py"), str(place), "--key", vkey]
    found["lone"] = timed(lambda: subprocess.run(program, check=True, stdout=subprocess.DEVNULL))
    return found


def fill(engine: Any, leaves: int, folder: Path) -> None:
    clock = SystemClock()
    writer = EventWriter(engine, worker="benchmark", clock=clock, spill_directory=folder / "spill", clear_names=True)
    for first in range(0, leaves, 1000):
        now = clock.now_us()
        some = range(first, min(leaves, first + 1000))
        writer.submit([ResidencyReleased(now, number, f"t{number % 3}", "finish", (), 0) for number in some])
        while writer.status().backlog > 20_000:
            time.sleep(0.01)
    check(writer.flush(600))
    writer.close()
    CheckpointSigner(engine, [KEY], memory=folder / "signed", clock=clock).sign_once()


def timed(call: Callable[[], Any]) -> dict[str, float]:
    began, used = time.perf_counter(), time.process_time()
    call()
    return {
        "wall_s": round(time.perf_counter() - began, 2),
        "processor_s": round(time.process_time() - used, 2),  # of this process alone
    }


def check(sound: bool) -> None:
    if not sound:
        raise SystemExit("the benchmark's own export is not sound")


def main() -> None:
    bench = Bench(__doc__, "kvcustody", "cryptography")
    bench.add("leaves", type=int, nargs="?", default=1_000_000)
    options = bench.parse()
    with tempfile.TemporaryDirectory() as made:
        bench.keep(measure(options.leaves, Path(made)), show=True)


if __name__ == "__main__":
    main()
