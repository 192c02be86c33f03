"""A module that serves one neighbour alone stands in its file; one that is an idea of its own is listed here."""

from __future__ import annotations

from standins.architecture.module_graph import ROOMS as ALL_ROOMS
from standins.architecture.module_graph import sources
from standins.architecture.neighbours import serve_one_neighbour

# Rooms whose modules have joined.
ROOMS: frozenset[str] = frozenset({"allocator", "audit", "governance", "kernels", "migrations", "policies"})
LINES_MAX = 1000
LARGER: frozenset[str] = frozenset({"governance.external.engine_port", "integrations.vllm.tiers.scheduler_tiers"})

# The module below `kvcustody` and why it stands apart.
APART: dict[str, str] = {
    # -- policies, allocator, migrations, audit
    "allocator.manager.integrity": "checksums compared before a path is attached are an idea of their own",
    "allocator.manager.reclaim": "making room within quotas and guarantees is an idea of its own, with a class",
    "audit.exports.amalgamate": "makes one program of the verifier's modules; an export only carries it",
    "audit.reports.sections.read_back": "a section of a report has a file and a template of its own",
    "audit.siem.ocsf": "the table of a public standard's event classes is an idea of its own",
    "audit.tlog.database_tiles": "reads stored hashes as tiles, which proofs only use",
    "audit.verify.ledger.held_rows": "who holds which block is an idea of its own",
    "audit.verify.ledger.register_rows": "rows that are no projection of a leaf are an idea of their own",
    "migrations.online.new_form": "statements that create, lock and swap tables, called by module name",
    "policies.reading.obligations": "obligations by classification are an idea of their own",
    # -- governance
    "governance.api.http.bounded_protocol": "limits of one HTTP connection; the server opens sockets and ends",
    "governance.control_plane.erasures": "the loop of orders has rules of its own; opening only wires it",
    "governance.control_plane.kept_batches": "files of acknowledged batches; the remote ledger sends the others",
    "governance.control_plane.own_erasures": "a file of requests outlives the process; the remote ledger hands it in",
    "governance.orphans.pool_census": "array operations over a tree; the scan compares what they count",
    "governance.service.fleet.metrics_collector": "a thread that reads any figures, with a clock and ages of its own",
    "governance.service.ingest.commit_turns": "turns between control planes: no batch and no SQL of ingest is in it",
    "governance.service.ingest.reader_processes": "processes and pipes; ingest commits what they have read",
    "governance.service.schedules.folder_delivery": "one destination a file, each with its own refusals",
    "governance.service.schedules.s3_delivery": "one destination a file, each with its own refusals",
    "governance.service.schedules.webhook_delivery": "one destination a file, each with its own refusals",
    "governance.tiers.stores.mooncake_client": "one store's wire a file, with a driver of its own",
    "governance.tiers.stores.remote_store": "what holds for every remote store; opening one only chooses",
    "governance.tiers.stores.s3_client": "one store's wire a file, with a driver of its own",
    "governance.tiers.stores.valkey_client": "one store's wire a file, with a driver of its own",
}


def test_a_module_of_one_neighbour_stands_in_its_file() -> None:
    candidates = {name.removeprefix("kvcustody."): importer for name, importer in serve_one_neighbour().items()}
    assert {name: of for name, of in candidates.items() if name.split(".")[0] in ROOMS and name not in APART} == {}
    assert set(APART) <= set(candidates), "has joined, or has more importers: take it from the list"
    assert all(len(reason.split()) > 3 for reason in APART.values())


def test_no_file_is_larger_than_a_reader_can_hold() -> None:
    sizes = {name.removeprefix("kvcustody."): path.read_text().count("\n") for name, path in sources().items()}
    assert {name for name, lines in sizes.items() if lines > LINES_MAX} == LARGER


def test_the_rooms_that_are_checked_exist() -> None:
    assert set(ALL_ROOMS) >= ROOMS
