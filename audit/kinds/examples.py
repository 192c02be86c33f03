"""One example of each kind of event, for pages, commands and tests: plain values, each said once for its field.

A field has the same example in every kind, unless `_OF_KIND` says otherwise. Durations and moments are microseconds.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import numpy as np

from kvcustody.audit.kinds.block_runs import Run
from kvcustody.audit.kinds.custody_events import (
    BlocksReleased,
    CustodyChanged,
    CustodyEnded,
    ReceiptRecorded,
    ResidencyReleased,
)
from kvcustody.audit.kinds.event import Event
from kvcustody.audit.kinds.registry import KINDS

_BEGUN_US = 3_600_000_000  # an hour after the start of the machine, on its own clock
_MINUTE_US = 60_000_000
_DIGEST = "sha256:" + "9f86d081884c7d65" * 4
_INCARNATION = "0f8fad5bd9cb469fa16570867728950e"
_RUN = Run(np.arange(64, 68), 1000)
_VKEY = "ledger.example+0d18baaf+Adsq+lAo59slPvxURy/O98mWY3Na5Q+YvD4xBsv3DOQk"

_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("actor", "approver", "principal"), "olivia"),
    **dict.fromkeys(("copies_destroyed", "copies_ended", "copies_stored", "objects"), (4,)),
    **dict.fromkeys(("epoch", "first", "launch", "of", "revision", "scan", "number"), 1),
    **dict.fromkeys(("first_batch", "first_sequence", "sequence"), 17),
    **dict.fromkeys(("from_us", "retired_us", "started_us", "at_us", "ordered_utc"), _BEGUN_US),
    **dict.fromkeys(("last_batch", "last_sequence"), 20),
    **dict.fromkeys(("owner", "reader", "tenant", "of_tenant"), "acme"),
    **dict.fromkeys(
        ("previous", "pool", "duplicates", "late", "nonzero", "changed", "remaining", "shard"), 0
    ),
    **dict.fromkeys(
        ("absolute_us", "ceiling_us", "deadline_us", "due_us", "ends_utc"), _BEGUN_US + 60 * _MINUTE_US
    ),
    **dict.fromkeys(("actual_us", "recompute_us", "transfer_us"), 900),
    **dict.fromkeys(("runs", "written"), (_RUN,)),
    **dict.fromkeys(("scrub_within_us", "within_us"), _MINUTE_US),
    **dict.fromkeys(("torn_bytes", "earlier_blocks", "finishing"), 0),
    "about": "",
    "action": "create",
    "added": 120,
    "agrees": True,
    "answer_ms": 42,
    "asked": True,
    "age_us": 90 * _MINUTE_US,
    "ahead_seconds": 86_400,
    "allocated": 4096,
    "asserted": True,
    "attached": (Run(np.arange(32, 34), 900),),
    "attempts": 12,
    "attribution": "salt",
    "base_size": 4000,
    "before": "0046",
    "below": 4096,
    "blocks": 4,
    "blocks_each": (4, 4),
    "bound_seconds": 300,
    "bytes": 1_048_576,
    "bytes_each": (262_144, 262_144),
    "bytes_per_block": 262_144,
    "case_id": "K7Q2M9X4",
    "cause": "finished",
    "change": "restricted",
    "channel": "post",
    "checked": 4,
    "checkpoint": 4096,
    "choice": "load",
    "classification": "internal",
    "closed_by": "gpu-1",
    "copies": 2,
    "crosses": False,
    "destination": "archive",
    "destinations": ("archive",),
    "destroyed_us": (_BEGUN_US + 2 * _MINUTE_US, _BEGUN_US + 2 * _MINUTE_US),
    "detail": "quarterly review",
    "device": "cuda:0",
    "digest": _DIGEST,
    "domains": (3,),
    "door": "door-1",
    "effect": "permit",
    "endpoint": "tcp://127.0.0.1:5557",
    "ended_us": _BEGUN_US + _MINUTE_US,
    "ends": ("2026-12-29T22:59:59Z",),
    "engine": "vllm-0",
    "erasure": "5d0ac1b2e3f44a5f8a9b0c1d2e3f4a5b",
    "every": "month",
    "filters": ("tenant",),
    "finding": 1,
    "findings": 1,
    "forecast_tokens": 96,
    "found_tokens": 96,
    "framework": "iso-27001",
    "free_blocks": 3000,
    "fleet_epoch": 0,
    "generation": 1000,
    "ground": "",
    "hold": "matter-2026-7",
    "hold_us": 0,
    "holds": (7, 0),
    "holidays": ("2026-12-25",),
    "leafless": 0,
    "ids": ("labs-reads-acme",),
    "idx": 16,
    "incarnation": _INCARNATION,
    "issuer": "https://idp.example.org",
    "latency_class": "interactive",
    "level": "device",
    "lost_size": 4100,
    "method": "kernel",
    "mode": "monitor",
    "model": "3b1f0c2d4e5f6071",
    "name": "regulated-saas",
    "names": ("a1b2c3d4e5f60718", "b2c3d4e5f6071829"),
    "numbers": (1, 2),
    "of_kind": "erasure-requested",
    "of_log": "tenant/acme",
    "of_worker": "",
    "operation": "listEvents",
    "opinion": "unqualified",
    "order": 3,
    "orders": "signed",
    "origin": "",
    "orphan": "unowned-block",
    "outcome": "complete",
    "own": True,
    "part_blocks": 4,
    "period": "2026-10",
    "place": "engine",
    "policy": "regulated-saas",
    "profile": "isolated",
    "promised_tokens": 112,
    "prompt_tokens": 128,
    "pseudonyms": 1,
    "queue": 2,
    "reason": "request 7",
    "reasons": ("own",),
    "receipt": "1f4e6d0c9b8a7f5e3c2d1b0a99887766",
    "received_utc": 1_780_000_000_000_000,
    "record": "{}",
    "refused": "",
    "refused_tokens": 16,
    "report": "r-2026-10",
    "requests": 1,
    "residencies": 1,
    "residency": 7,
    "result": "zeroed",
    "reused_tokens": 96,
    "roles": ("auditor",),
    "rows": 1200,
    "rule": "labs-reads-acme",
    "schedule": "monthly-iso",
    "scope": "subject",
    "scope_epoch": 3,
    "score": 875_000,
    "scrubbed": (4,),
    "seed": "",
    "segments": 1,
    "selector": "subject",
    "session": None,
    "shards": 1,
    "share": 1.0,
    "share_millionths": 1_000_000,
    "signature": "",
    "signed_by": "reports.example",
    "silent_seconds": 600,
    "sink": "siem",
    "size": 8192,
    "software": "kvcustody",
    "source": "127.0.0.1",
    "spill_lost": False,
    "stage": "canary",
    "status": 200,
    "step": 1,
    "stored_us": (_BEGUN_US, _BEGUN_US),
    "subject": "user-1",
    "subject_right": "erasure",
    "target": "3b0f6a52",
    "teardown": "process",
    "tables": ("decisions",),
    "tenant_epoch": 0,
    "tenants": ("acme",),
    "text": "",
    "tier": "nvme",
    "tiers": ("nvme",),
    "tokens": 96,
    "trace": "",
    "until_seconds": 1_780_086_400,
    "uses": 3,
    "until_us": (_BEGUN_US + 30 * _MINUTE_US,),
    "verified": 4,
    "version": 3,
    "via": "own",
    "vkey": _VKEY,
    "worker": "gpu-0",
    "zone": "Europe/Berlin",
}
_COPIES: dict[str, Any] = {
    "due_us": (_BEGUN_US + 60 * _MINUTE_US,) * 2,
    "ended_us": (_BEGUN_US + _MINUTE_US,) * 2,
}
_OF_KIND: dict[str, dict[str, Any]] = {
    "attempts-refused": {"reason": "unknown key"},
    "blocks-released": {"cause": "finished"},
    "case-opened": {"actor": "dora"},
    "case-step": {"actor": "dora", "step": "identity", "outcome": "verified"},
    "clock-confirmed": {"reason": "the machine was off for a day"},
    "tier-inherited": {
        "outcome": "restored",
        "left_by_worker": "gpu-1",
        "left_by_process": "5e" * 16,
        "copies": ("ab" * 32,),
        "blocks_in_each": (16,),
        "sizes_in_each": (1 << 20,),
    },
    "copies-destroyed": {"cause": "key destroyed"},
    "copies-ended": {**_COPIES, "cause": "evicted"},
    "copies-stored": {**_COPIES, "cause": "stored"},
    "custody-ended": {"cause": "released"},
    "decision": {"action": "reuse", "owner": "labs", "reasons": ("labs-reads-acme",), "via": "grant"},
    "erasure-completed": {"reason": ""},
    "erasure-remaining": {"reason": "a running request holds it"},
    "erasure-requested": {"detail": "", "actor": "dora"},
    "gap": {"cause": "the disk was full"},
    "hit-counted": {"owner": "labs"},
    "hit-counters": {"owner": "labs"},
    "issuer-assigned": {"tenants": "acme"},
    "blocks-handed-over": {
        "step": "received",
        "peer": "prefill-1",
        "peer_life": "5e" * 16,
        "ticket": "7c" * 16,
        "objects": 2,
        "bytes": 1 << 20,
        "reason": "",
    },
    "key-event": {"action": "destroyed", "in_service": "pending"},
    "keys-dropped": {"epochs": 1},
    "keys-ordered": {"reason": "quarterly rotation"},
    "legal-hold": {"action": "placed", "reason": "litigation"},
    "log-broken": {"reason": "failover of 3 May"},
    "observation-gap": {"cause": "the engine sent faster than it was read"},
    "observed-removed": {"cause": "removed"},
    "order-signed": {"reason": "it was given before keys were set"},
    "orphan-found": {"action": "released", "cause": "lost request", "outcome": "recovered"},
    "orphan-scanned": {"mode": "full"},
    "policy-staged": {"stage": "canary"},
    "policy-text": {"text": "name: regulated-saas"},
    "principal-changed": {"principal": "ada", "detail": "kvc_5f3a"},
    "receipt": {"result": "ok", "level": "retired"},
    "release-step": {"action": "approve", "detail": ""},
    "replay-completed": {"torn_bytes": 0},
    "report-delivery": {"action": "delivered", "reason": ""},
    "retention-purged": {"first": 0, "approver": "dora", "reason": "retention of 400 days"},
    "hints-clipped": {
        **{"door": "door-1", "seconds": 60, "hints": ("priority",), "asked": ("9",), "passed": ("0",)},
        **{"requests_each": (12,), "others": 0},
    },
    "schema-changed": {"revision": "0049"},
    "sink-changed": {"action": "retry", "reason": "the receiver is back"},
    "spill-started": {"cause": "the database is locked by another writer"},
    "transfer-decided": {"action": "restore", "choice": "transfer", "outcome": "done", "reason": "cheaper"},
    "worker-died": {
        "approver": "",
        "closed_by": "silence",
        "actor": "control-plane",
        "reason": "",
        "teardown": "",
    },
    "worker-stopped": {"cause": "closed"},
}


_Kind = TypeVar("_Kind", bound=Event)


def example_of(kind: type[_Kind]) -> _Kind:
    """An event of the kind, the same in every process; of a kind that holds others, with one of each.

    Raises `KeyError` for a field that has no example.
    """
    own = _OF_KIND.get(KINDS[kind].name, {})
    if issubclass(kind, CustodyChanged):
        own = {"released": _held(ResidencyReleased), "passed": _held(BlocksReleased)}
        own |= {"ended": _held(CustodyEnded), "scrubbed": _held(ReceiptRecorded)}
    values: dict[str, Any] = {
        name: own[name] if name in own else _FIELDS[name] for name in kind.__struct_fields__
    }
    return kind(**values)


def _held(kind: type[_Kind]) -> tuple[_Kind]:
    """One item of a leaf of several: of the process that wrote the leaf."""
    return (msgspec.structs.replace(example_of(kind), incarnation=""),)
