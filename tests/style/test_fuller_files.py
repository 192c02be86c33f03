"""A module that serves one neighbour alone stands in its file; one that is an idea of its own is listed here."""

from __future__ import annotations

from standins.architecture.module_graph import sources
from standins.architecture.neighbours import serve_one_neighbour

LINES_MAX = 1000

# The module below `kvcustody` and why it stands apart.
APART: dict[str, str] = {
    "lab.replay.traces.text_traces": "traces with prompts as text; each family of formats has a file",
    "console.audit.tiles": "`audit tiles`, a command of its own; only the check of a folder is shared",
    "console.doctor.ledger": "the ledger's checks; each part of a deployment has a file",
    "console.doctor.machine": "the machine's checks; each part of a deployment has a file",
    "console.doctor.service": "the service's checks; each part of a deployment has a file",
    "console.doctor.worker": "the worker's checks; each part of a deployment has a file",
    "console.erasure.print_erasures": "loaded to print an answer, without the ledger that the other commands open",
    "console.policy.enforcement": "commands about enforcement, beside those about releases",
    "console.policy.explain_and_test": "two commands with a parser of requests of their own",
    "console.policy.export": "a command that needs the writers of other languages",
    "console.policy.orders": "commands that write orders into a ledger, without a policy",
    "console.policy.release": "the steps of a release; the group only lists its parts",
    "console.policy.release_keys": "who signs policies; a release's steps share nothing with it",
    "console.policy.segment": "a command that needs keys and a tokenizer",
    "console.policy.simulate": "a command that runs recorded requests and traces",
    "console.principal.print_principals": "loaded to print an answer, without the commands about keys",
    "console.render.html": "the templates' environment; forms choose among HTML, PDF and JSON",
    "console.report.keys": "who signs reports; making a report shares nothing with it",
    "console.report.package.controls_table": "one of two unrelated file formats of a package",
    "console.report.package.oscal_set": "one of two unrelated file formats of a package",
    "console.report.ropa": "another document than a report, with options of its own",
    "console.report.schedules": "calls to a server about calendars, without a ledger",
    "console.size.device": "one of two commands that share nothing",
    "console.size.evidence": "one of two commands that share nothing",
    "console.web.audit_export": "a file of the audit explorer; the application only routes",
    "integrations.door.reverse_proxy": "a proxy is an ASGI application of its own",
    "integrations.events.observed_engine": "an engine's state, which needs no socket and no ledger",
    "integrations.events.vllm_wire": "one engine's wire format, beside those of others",
    "integrations.fleet_worker.engine": "an engine, which serves without HTTP as well",
    "integrations.jetstream.reader": "what a router builds on; watching is one use of it",
    "integrations.lmcache.keys_elsewhere": "works without LMCache, which the serde imports at its top",
    "integrations.tensorrt_llm.kv_events": "reads and writes the engine's event format",
    "integrations.tensorrt_llm.scheduler_half": "the connector's half in the scheduler",
    "integrations.tensorrt_llm.worker_half": "the connector's half in the worker",
    "integrations.transformers.batching.manager": "governs a class that has a module in transformers, too",
    "integrations.transformers.batching.paged_cache": "governs a class that has a module in transformers, too",
    "integrations.transformers.classic.custodian": "custody of slabs, which needs no transformers",
    "integrations.transformers.classic.offloaded_layers": "one kind of cache layer, each with a file",
    "integrations.transformers.classic.quantized_layers": "one kind of cache layer, each with a file",
    "integrations.transformers.classic.sliding_window_layers": "one kind of cache layer, each with a file",
    "integrations.vllm.tiers.worker_handover": "transfers between workers over the network, on a thread of their own",
    "lab.fleet.dynamo_router": "one of two routers that share nothing",
    "lab.fleet.dynamo_selection": "read as a file by scripts in an environment without kvcustody",
    "lab.fleet.running_router": "one of two routers that share nothing",
    "lab.replay.run.observer": "counts a run's events; it neither opens nor closes anything",
    "testkit.lmcache.deployment": "works without LMCache, which the conformance engine imports at its top",
    "testkit.lmcache.server": "a program that is started by its name (`python -m`)",
    "testkit.lmcache.transfers": "works without LMCache, which the conformance engine imports at its top",
    "allocator.manager.integrity": "checksums compared before a path is attached are an idea of their own",
    "allocator.manager.reclaim": "making room within quotas and guarantees is an idea of its own, with a class",
    "audit.exports.amalgamate": "makes one program of the verifier's modules; an export only carries it",
    "audit.reports.sections.read_back": "a section of a report has a file and a template of its own",
    "audit.siem.ocsf": "the table of a public standard's event classes is an idea of its own",
    "audit.tlog.database_tiles": "reads stored hashes as tiles, which proofs only use",
    "audit.verify.ledger.held_rows": "who holds which block is an idea of its own",
    "audit.verify.ledger.register_rows": "rows that are no projection of a leaf are an idea of their own",
    "console.render.charts": "the geometry of documents' charts, alike in HTML and PDF; the page only prints it",
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
    assert {name: of for name, of in candidates.items() if name not in APART} == {}
    assert set(APART) <= set(candidates), "has joined, or has more importers: take it from the list"
    assert all(len(reason.split()) > 3 for reason in APART.values())


def test_no_file_is_larger_than_a_reader_can_hold() -> None:
    sizes = {name.removeprefix("kvcustody."): path.read_text().count("\n") for name, path in sources().items()}
    assert {name for name, lines in sizes.items() if lines > LINES_MAX} == set()
