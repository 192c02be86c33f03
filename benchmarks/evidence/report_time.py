"""How long a report of a period takes: 1M events, every section, both implementations of coverage, every format.

Beside it: a report of the last quarter of the same ledger, whose trend is of the three before it; one with a sample of
1,000, whose annexes are in files; and the verification of the whole's report from an export.

    python benchmarks/evidence/report_time.py [--events N] [--db FILE] [--out FILE]

`cpu_s` is of the process that makes the report, its JSON and HTML; `pdf_cpu_s` of the one that prints the HTML;
`beside_cpu_s` of the one that recounts. Side by side the first and the last take the longer of the two where there are
two cores. `memory_mib` is the most that each has had; every report is made in a process of its own.
"""

from __future__ import annotations

import re
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from kvcustody.audit.exports.export_writer import write_export
from kvcustody.audit.exports.ledger_source import LedgerSource
from kvcustody.audit.kinds import (
    CustodyEnded,
    Event,
    ReceiptRecorded,
    ResidencyOpened,
    ResidencyReleased,
    WorkerStarted,
)
from kvcustody.audit.kinds.block_runs import Run
from kvcustody.audit.leaf import Context
from kvcustody.audit.leaf.batch_encoder import BatchEncoder
from kvcustody.audit.reports.build_report import build_report, newest_checkpoint, period
from kvcustody.audit.reports.parameters import ReportParameters
from kvcustody.audit.store.database.engine import WRITE, open_store
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.signed_note import KeyKind
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.audit.verify.documents.report_rules import read_report
from kvcustody.audit.write.append_leaves import Appender
from kvcustody.clock import SystemClock
from kvcustody.migrations.upgrade import upgrade
from standins.audit.documents import report_again, verify_report

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from bench import Bench
from ledger_workload import BATCH

KEY = SigningKey.from_seed("bench.example/ledger", KeyKind.ED25519, bytes([27]) * 32)
OFFSET_US = 1_760_000_000_000_000
SECOND_US = 1_000_000


def story(events: int) -> Iterator[Event]:
    """A day of conversations of three requests that hold the same prefix; one in 500 is wiped late."""
    yield WorkerStarted(1, "bench", 1 << 20, 1, 65536, "cpu", "bench")
    chance = np.random.default_rng(7)
    conversations, generation = events // 12, 1
    for number in range(conversations):
        tenant, at = f"tenant-{number % 32}", SECOND_US + number * 86_400 * SECOND_US // conversations
        held_until = at + 60 * SECOND_US
        runs: list[Run] = []
        for turn in range(3):
            blocks, residency, began = 1 + number % 7, 3 * number + turn + 1, at + turn * SECOND_US
            run = Run(np.sort(chance.integers(0, 1 << 20, blocks)), generation)
            generation += blocks
            yield ResidencyOpened(
                began, residency, tenant, f"user-{number % 997}", None, False, "internal", (1,), tuple(runs),
                ("own-scope",), 1, began + 600 * SECOND_US, (run,), "bench",
            )  # fmt: skip
            runs.append(run)
            yield ResidencyReleased(began + 2_000, residency, tenant, "finish", (), held_until)
        wiped = held_until + 100 + (2 * SECOND_US if number % 500 == 0 else 0)
        for turn, run in enumerate(runs):
            yield CustodyEnded(
                held_until,
                tenant,
                "internal",
                (run,),
                "expired",
                held_until,
                held_until,
                at + 3 * SECOND_US,
                SECOND_US,
            )
            yield ReceiptRecorded(
                wiped + 900, 3 * number + turn, 0, tenant, "memset", "cpu", len(run.blocks) * 65536, wiped, wiped + 900,
                "full" if number % 5 else "sampled", 1.0, len(run.blocks), "ok", (run,),
            )  # fmt: skip


def fill(path: Path, events: int) -> int:
    """A ledger of the story with one signed checkpoint; returns how many leaves it has."""
    engine = open_store(path)
    upgrade(engine)
    context = Context(
        "be" * 16, OFFSET_US, lambda tenant, subject, session="": f"{tenant}-{subject}".encode().hex()[:32]
    )
    appender, encoder, told, sequence = Appender(), BatchEncoder(context), enumerate(story(events), 1), 0
    with engine.connect().execution_options(**WRITE) as connection:
        while items := [*islice(told, 20 * BATCH)]:
            sequence = items[-1][0]
            with connection.begin():
                appender.append(connection, encoder.encode(items).batch)
    CheckpointSigner(engine, [KEY], memory=path.with_suffix(".last"), clock=SystemClock()).sign_once()
    engine.dispose()
    return sequence


def measure(path: Path, recount: bool, quarter: bool = False, sample: int = 25) -> dict[str, float | int]:
    """Seconds of processor time and of the clock, for the report and for its forms."""
    from kvcustody.console.render.document_forms import rendered

    engine = open_store(path, read_only=True, mapped=True)
    parts: list[tuple[str, float]] = []
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began, wall = time.process_time(), time.perf_counter()
    with engine.connect() as connection:
        checkpoint = newest_checkpoint(connection)
        since, until = period(connection, checkpoint, None, None)
        since = until - (until - since) // 4 if quarter else since
        asked = ReportParameters("nist-800-53", checkpoint, since, until, recount=recount, sample=sample)
        report = build_report(connection, asked, progress=lambda part: parts.append((part, time.process_time())))
    built = time.process_time()
    json = report.to_bytes()
    in_json = time.process_time()
    page = rendered(report)
    done = time.process_time()
    assert report["total"].due == report["population"].units
    assert report["recount"] is None or not report["recount"].differences
    ends = [moment for _, moment in parts[1:]] + [built]
    found: dict[str, float | int] = {
        f"{re.sub(r'[^a-z]+', '_', part.lower())}_cpu_s": round(end - start, 2)
        for (part, start), end in zip(parts, ends, strict=True)
    }
    return found | {
        "custodies": report["population"].custodies,
        "build_cpu_s": round(built - began, 2),
        "json_cpu_s": round(in_json - built, 2),
        "html_cpu_s": round(done - in_json, 2),
        "csv_files": len(page.files),
        "cpu_s": round(done - began, 2),
        "wall_s": round(time.perf_counter() - wall, 2),
        **beside(before),
        "json_bytes": len(json),
        "html_bytes": len(page.html),
        "csv_bytes": sum(map(len, page.files.values())),
        **alone(print_page, page.html),
    }


def print_page(html: str) -> dict[str, float | int]:
    """A PDF, by the process that makes it."""
    from kvcustody.console.render.pdf import pdf_of

    wall = time.perf_counter()
    pdf = pdf_of(html)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "pdf_cpu_s": round(seconds_of(used), 2),
        "pdf_wall_s": round(time.perf_counter() - wall, 2),
        "pdf_memory_mib": used.ru_maxrss // 1024,
        "pdf_bytes": len(pdf),
    }


def state(path: Path, folder: Path) -> dict[str, float | int]:
    """What an auditor is given: an export, and a report of all of it."""
    engine = open_store(path, read_only=True, mapped=True)
    write_export(folder / "export", LedgerSource(engine), made_at_us=1)
    with engine.connect() as connection:
        checkpoint = newest_checkpoint(connection)
        asked = ReportParameters("nist-800-53", checkpoint, *period(connection, checkpoint, None, None))
        data = (folder / "report.json").write_bytes(build_report(connection, asked).to_bytes())
    return {"bytes": data}


def verify(folder: Path) -> dict[str, float | int]:
    """The same for a report that its reader checks from an export alone."""
    vkeys, data = [str(KEY.verifier)], (folder / "report.json").read_bytes()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began, wall = time.process_time(), time.perf_counter()
    again = report_again(folder / "export", read_report(data), vkeys)
    built = time.process_time()
    found = verify_report(data, vkeys, source=again)
    done = time.process_time()
    assert found.ok, found.problems
    return {
        "again_cpu_s": round(built - began, 2),
        "check_cpu_s": round(done - built, 2),
        "cpu_s": round(done - began, 2),
        "wall_s": round(time.perf_counter() - wall, 2),
        **beside(before),
    }


def alone(call: Callable[..., dict[str, float | int]], *given: object) -> dict[str, float | int]:
    """What a measurement finds in a process of its own."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(call, *given).result()


def seconds_of(used: resource.struct_rusage) -> float:
    """Processor time of a program and of the kernel for it."""
    return used.ru_utime + used.ru_stime


def beside(before: resource.struct_rusage) -> dict[str, float | int]:
    """What processes that ended since `before` took, and the memory that they and this one had at most."""
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = seconds_of(after) - seconds_of(before)
    mine = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "beside_cpu_s": round(seconds, 2),
        "memory_mib": mine // 1024,
        "beside_memory_mib": after.ru_maxrss // 1024,
    }


def main() -> None:
    """Print one JSON object."""
    bench = Bench(__doc__, "SQLAlchemy", "numpy", "weasyprint")
    bench.add("--events", type=int, default=1_000_000)
    bench.add("--db", type=Path, help="Where the ledger is kept, or is already.")
    options = bench.parse()
    with tempfile.TemporaryDirectory() as folder:
        path = options.db or Path(folder, "ledger.db")
        if not path.exists():
            fill(path, options.events)
        result = {
            "events": options.events,
            "with_recount": alone(measure, path, True),
            "without_recount": alone(measure, path, False),
            "last_quarter": alone(measure, path, False, True),
            "with_a_sample_of_1000": alone(measure, path, False, False, 1000),
        }
        alone(state, path, Path(folder))
        result["verified_from_an_export"] = alone(verify, Path(folder))
    bench.keep(result, show=True)


if __name__ == "__main__":
    main()
