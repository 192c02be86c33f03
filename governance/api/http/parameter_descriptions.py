"""What each parameter of the API means, where its own declaration does not say: for the API document, and so for the
help of `kvcustody api`.

A name means the same everywhere; where it does not, `operation.name` or `Schema.name` says what it means there.
"""

from __future__ import annotations

from typing import Any

_MEANINGS = {
    "action": "What is asked for: `reuse` of a cached block, or another action of the policy.",
    "actor": "Only events of this actor.",
    "after": "The number of the newest release that the worker has; 0: none.",
    "allow_last": "Even the last one who manages keys.",
    "as_of": "Size of a root checkpoint: the ledger as it was then.",
    "at_us": "The moment of the decision, UTC µs; default: now.",
    "bind": "Bind the new key to the client certificate that this request came with.",
    "block": "The block's number in its pool.",
    "block_tokens": "Tokens of a block, to reckon with.",
    "about": "An erasure's id, a recipient, a third party, or how an answer was sent.",
    "addressee": "Name and address of the person; in the letter alone.",
    "case": "The case's id.",
    "cases": "The test cases, as YAML.",
    "certificate": "The client certificate that the key is bound to, as `x5t#S256`.",
    "channel": "How the request came in: `mail`, `letter`, `telephone`; no address.",
    "charged": "Blocks that each tenant is charged for.",
    "tenants": "What each tenant does there, by measure: tokens of running requests, blocks computed again, thrashing.",
    "classification": "Only this classification of data.",
    "ErasureRequest.classification": "Only what is classified so.",
    "PolicyQuestion.classification": "The classification of the data.",
    "contact": "How the controller is reached.",
    "controller": "Who is the controller: name and address.",
    "data": "Which categories of personal data there are.",
    "days": "Days until the key ends.",
    "deadline_seconds": "Seconds until the erasure must be proven, or the scan answered.",
    "digest": "SHA-256 of the letter or export that was given.",
    "destinations": "Where its reports are handed over, by name (`listReportDestinations`).",
    "erasure": "The erasure's id.",
    "every": "After each of what: `weekly`, `monthly` or `quarterly`.",
    "extends": "Size of the root checkpoint of an earlier report that this one goes on from.",
    "form": "The form of the leaves.",
    "LetterRequest.form": "What the letter is written as.",
    "formats": "The forms in which the report is made; default: all that are installed.",
    "framework": "The catalogue of controls that the report answers to.",
    "generation": "The number of a hand-out: a pool has a new one for each block that it hands out.",
    "listEvents.generation": "Only events of the block that its pool handed out under this number.",
    "summarizeEvents.generation": "Only events of the block that its pool handed out under this number.",
    "ground": "The ground in the GDPR, as `17(3)(e)`.",
    "grant": "Only decisions under this grant.",
    "PolicyQuestion.grant": "The grant that is relied on.",
    "hour": "The full hour, in its time zone, at which a report is due.",
    "idx": "The leaf's index in its log.",
    "incarnation": "A worker's process: 32 hexadecimal digits.",
    "index": "The tile's index in its level.",
    "issuer": "The name of an issuer of tenants that the worker met.",
    "selector": "What is to be erased, as the canonical line of a selector.",
    "items": "How often each source was refused, by reason.",
    "job": "The job's id.",
    "key_days": "Days until its first key ends.",
    "keys": "Public keys of the ledger, each as `name+id+base64`.",
    "LetterRequest.kind": "The answer, that more time is needed, or the question who they are.",
    "kind": "Whether it is a person or a machine.",
    "HandoverModel.kind": "The kind of the new key; default: the old one's.",
    "level": "The tile's level; 0 holds the hashes of leaves.",
    "name": "The principal's name.",
    "getJobFile.name": "The file's name, as the job lists it.",
    "attachSink.name": "The sink's name.",
    "detachSink.name": "The sink's name.",
    "retrySink.name": "The sink's name.",
    "names": "Pseudonyms, as leaves have them.",
    "notes": "Checkpoints that somebody kept, which the ledger must extend.",
    "runs": "Consecutive sequences of a process of this worker, the oldest first.",
    "officer": "The data protection officer's name and address.",
    "offset_us": "The worker's clock less UTC, µs.",
    "old": "The policy of before, as YAML; default: the one in effect.",
    "old_size": "Size of the older checkpoint.",
    "order": "The order's id.",
    "StepRequest.outcome": "What it came to, where the step has an outcome.",
    "outcome": "Only events with this outcome, effect or result, as `permit`, `deny`, `failed`.",
    "overlap_days": "Days for which the key of before still works.",
    "owner": "Whose block it is: a tenant.",
    "policy": "The policy to describe, as YAML; default: the one in effect.",
    "policy_revision": "The revision that the worker runs; 0: none.",
    "pool": "The pool's number.",
    "prefix": "The key's 12 hexadecimal digits; left out: all keys of the principal.",
    "revokeOwnKey.prefix": "The key's 12 hexadecimal digits.",
    "purposes": "The purposes of the processing.",
    "reader": "Who asks: a tenant.",
    "received": "When the request came in, UTC µs; default: now.",
    "reason": "Why, for the record.",
    "spill_lost": "Nothing that it spilled will come any more.",
    "report": "The report's id.",
    "record": "The signed record, as `kvcustody policy` writes it.",
    "recount": "Recompute the coverage from the leaves, and compare.",
    "requests_max": "The most requests to replay.",
    "residency": "Only events of this residency.",
    "right": "What the person asks for.",
    "revision": "The policy revision's number.",
    "listEvents.order": "`log`: log by log; `newest` or `oldest`: all logs together by time.",
    "listEvents.revision": "Only decisions under this policy revision.",
    "revoked": "Grants that are taken as revoked.",
    "ReportRequest.zone": "The time zone whose times the report's pages show beside UTC.",
    "ProcessingRequest.role": "Whose record: of a controller (30(1)) or of a processor (30(2)).",
    "roles": "What the principal may do.",
    "rule": "Only decisions by this rule of the policy.",
    "sample": "How many released blocks are shown one by one.",
    "scan": "The scan's number within its process.",
    "schedule": "The schedule's id.",
    "scope": "How widely the block is shared.",
    "seconds": "The window that the counts are of.",
    "organisation": "The organisation that the report is of.",
    "prepared_by": "Who answers for the report: a name and a role.",
    "threshold": "Percent of units in time that the report's reader asks for.",
    "seed": "What the sample is drawn with: the same gives the same sample.",
    "segment": "Only this shared segment.",
    "sender": "Who writes: name and address.",
    "sequence": "The batch's number, from 1 on.",
    "session": "Only this session.",
    "since": "From this UTC microsecond on.",
    "size": "Size of the checkpoint: leaves of its log.",
    "source": "The policy, as YAML.",
    "step": "What was done.",
    "status": "Figures of the worker by name.",
    "CaseRequest.subject": "The person, as the tenant's identity names them.",
    "subject": "Only this subject, by its own name.",
    "SubjectNamed.subject": "The subject's own name.",
    "subjects": "Which categories of people the data is of.",
    "tenant": "Only this tenant.",
    "SubjectNamed.tenant": "Whose subject it is.",
    "EnforcementAsked.mode": "Enforce for nobody (`monitor`), for some (`canary`), or for all (`enforce`).",
    "EnforcementAsked.tenants": "Of a canary: for all requests of these tenants.",
    "EnforcementAsked.share": "Of a canary: for this share of the sessions of all others, as `5%`.",
    "EnforcementAsked.until_us": "When everybody is enforced for again, UTC µs; at most 92 days ahead.",
    "TenantNamed.tenant": "Whose keys.",
    "Enrolment.tenant": "The one tenant whose data the principal sees.",
    "transfers": "Transfers to third countries.",
    "until": "Before this UTC microsecond.",
    "utc_us": "The worker's clock now, UTC µs; left out for a process that has ended.",
    "via": "By what the reader would reach it.",
    "width": "Hashes of the tile; a full tile has 256.",
    "worker": "The worker's name.",
    "zone": "The time zone whose weeks, months or quarters count.",
}


def describe_parameters(document: dict[str, Any]) -> None:
    """Add what an API document's parameters and properties of request bodies mean where they do not say."""
    for methods in document["paths"].values():
        for operation in methods.values():
            for parameter in operation.get("parameters", ()):
                _describe(parameter, operation["operationId"], parameter["name"])
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
            properties = document["components"]["schemas"].get(name, {}).get("properties", {})
            for part, schema in properties.items():
                _describe(schema, name, part)


def _describe(place: dict[str, Any], owner: str, name: str) -> None:
    if not place.get("description"):
        meaning = _MEANINGS.get(f"{owner}.{name}", _MEANINGS.get(name))
        if meaning is not None:
            place["description"] = meaning
