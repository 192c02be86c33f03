"""Each kind of leaf as one sentence: who did what, to whose blocks, and how many.

    sentence_of(body)       # "acme: request ended, 66 blocks zeroed in 1.5 ms, verified by sample"

1. Every kind has a sentence of its own (`tests/console/render/test_event_sentences.py`), and every field that one
   needs is in the leaf: a sentence leaves out what a leaf does not say, and never guesses.
2. Of a leaf that goes on in further parts each part says the whole.
3. The list, the event's page, the exports and the terminal print the same sentence. It has no name of a field, no
   microseconds, and no number without what it counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from kvcustody.audit.kinds import SYSTEM
from kvcustody.audit.leaf.change_items import plain_bodies
from kvcustody.audit.leaf.leaf_schema import SCHEMA_OF_NAME
from kvcustody.console.render.number_format import count, duration, second, time_text
from kvcustody.plurals import several
from kvcustody.times import SECOND_US

Body = Mapping[str, Any]
NOBODY = "nobody known"
_LEVELS = {
    "launched": "not known to have finished",
    "retired": "finished and not read back",
    "sampled": "verified by sample",
    "full": "verified in full",
}
_OF_ONE = {"are": "is", "were": "was", "have": "has", "stay": "stays", "refer": "refers", "name": "names"}


def sentence_of(body: Body) -> str:
    """Return the sentence for a leaf of any kind."""
    says, schema = SENTENCES.get(body["kind"]), SCHEMA_OF_NAME.get(body["kind"])
    if says is None or schema is None:
        return f"an event of the unknown kind {body['kind']}"
    return says({**schema.absent, **body})  # a leaf of before says the default of what it lacks


def _number(value: Any) -> str:
    return count(int(value))


def _many(number: Any, one: str, more: str = "") -> str:
    return several(int(number), one, more)


def _blocks(body: Body, key: str = "blocks") -> str:
    return _many(body.get(key, 0), "block")


def _verb(number: Any, verb: str) -> str:
    """Return a verb that agrees with a number."""
    return _OF_ONE[verb] if int(number) == 1 else verb


def _long(length_us: int) -> str:
    """Return a length of time, which is nowhere in microseconds."""
    if length_us < 1000:
        return "under 1 ms"
    return time_text(length_us) if length_us < 60 * SECOND_US else duration(length_us)


def _whose(body: Body, key: str = "tenant") -> str:
    return str(body.get(key) or NOBODY)


def _why(body: Body, key: str = "reason") -> str:
    return f" ({body[key]})" if body.get(key) else ""


def _for_erasure(body: Body) -> str:
    return f", for erasure {body['erasure']}" if body["erasure"] else ""


def _clipped(body: Body) -> str:
    rows = zip(body["hints"], body["asked"], body["passed"], body["requests_each"], strict=True)
    clipped = [f'{name} from "{asked}" to "{passed}", {_many(number, "time")}' for name, asked, passed, number in rows]
    return "; ".join([*clipped, *([f"{_many(body['others'], 'other')}"] if body["others"] else [])])


def _epoch_scope(body: Body) -> str:
    if body["scope"] == "fleet":
        return "everybody"
    if body["scope"] == "tenant":
        return _whose(body)
    whose = {"shared": "those without a scope of their own"}.get(body["scope"], f"a {body['scope']}")
    return f"{whose} of {_whose(body)}"


def _sent(body: Body) -> str:
    where = body["worker"] or body["target"]
    where_to = f"{_many(body['requests'], 'request')} of {_whose(body)} " + (
        f"went to {where}" if where else "went to a router, which does not say where"
    )
    answered = f"answered with HTTP status {body['status']}" if int(body["status"]) else "not answered"
    promised = int(body["promised_tokens"])
    more = f"; {_many(promised, 'token')} {_verb(promised, 'were')} promised" if promised >= 0 else ""
    return f"{where_to}, {answered}{more}"


def _listed(names: Any) -> str:
    return ", ".join(map(str, names)) or "nobody"


def _log(name: str) -> str:
    return "the system log" if name == SYSTEM else str(name).removeprefix("tenant/")


def _done(body: Body) -> str:
    """Return the act as a verb in the past."""
    return {"broke-glass": "broke the glass for"}.get(body["action"], str(body["action"]))


def _principal(body: Body) -> str:
    action, who = str(body["action"]), body["principal"]
    of_keys = {
        "key-issued": "issued a key to",
        "key-replaced": "replaced the keys of",
        "key-revoked": "revoked a key of",
        "key-kept": "kept a key of",
    }
    return f"{body['actor']} {of_keys.get(action, action)} {who}"


def _access(body: Body) -> str:
    about = f" about {body['of_tenant']}" if body.get("of_tenant") else " about every tenant"
    return f"{body['actor']} read the ledger{about} ({body['operation']})"


def _decision(body: Body) -> str:
    rules = _listed(body["reasons"]) if body["reasons"] else "default-deny, as no rule permits it"
    word = "was allowed to" if body["effect"] == "permit" else "was not allowed to"
    if body["owner"] == body["reader"]:
        return f"{body['reader']} {word} {body['action']} its own blocks, by {rules}"
    return f"{body['reader']} {word} {body['action']} {body['owner']}'s blocks, by {rules}"


def _counted(body: Body) -> str:
    whose = "its own blocks" if body["owner"] == body["tenant"] else f"blocks of {body['owner']}"
    asked = _many(body["requests"], "request")
    if body["effect"] != "permit":
        were = _verb(body["requests"], "were")
        word = "would have been denied" if body["effect"] == "would-deny" else f"{were} denied"
        return f"{asked} of {body['tenant']} {word} {body['action']} of {whose}, by {body['rule']}"
    size = f"{_blocks(body)} with {_many(body['tokens'], 'token')}"
    return f"{asked} of {body['tenant']} reused {size}, {whose}, by {body['rule']}"


def _opened(body: Body) -> str:
    earlier = int(body.get("earlier_blocks", 0))
    own = f", {count(earlier)} of them its own earlier work" if earlier else ""
    return (
        f"{body['tenant']}: request admitted ({body['classification']}), {_blocks(body)} attached{own}, "
        f"{_blocks(body, 'written_blocks')} handed out"
    )


def _monitored(body: Body) -> str:
    return (
        f"{body['tenant']}: a request that the policy was not enforced for reused {_number(body['reused_tokens'])} of "
        f"{_many(body['prompt_tokens'], 'token')}; the policy would have refused "
        f"{_many(body['refused_tokens'], 'token')}"
    )


def _released(body: Body) -> str:
    grown = f" and had grown by {_blocks(body)}" if body.get("blocks") else ""
    return f"{body['tenant']}: request ended ({body['cause']}){grown}"


def _receipt(body: Body) -> str:
    whose = body.get("tenant") or "no tenant (at the start of a process)"
    if body["result"] != "ok":
        return f"{whose}: {_blocks(body)} not shown to be zeroed, on shard {body['shard']}"
    level = _LEVELS.get(body["level"], body["level"])
    return f"{whose}: {_blocks(body)} zeroed in {_long(_took_us(body))}, {level}, on shard {body['shard']}"


def _took_us(receipt: Body) -> int:
    return max(0, int(receipt["ended_boot_us"]) - int(receipt["started_boot_us"]))


def _changed(body: Body) -> str:
    """Return what a process released, ended and overwrote of one tenant, summed."""
    sums: Counter[str] = Counter()
    causes: Counter[str] = Counter()
    levels: set[str] = set()
    took_us: list[int] = []
    for item in plain_bodies(body):
        kind, blocks = item["kind"], int(item["blocks"])
        sums[kind] += 1 if kind == "residency-released" else blocks
        if kind == "custody-ended":
            causes[item["cause"]] += blocks
        elif kind == "receipt":
            sums["failed"] += blocks * (item["result"] != "ok")
            levels.add(_LEVELS.get(item["level"], item["level"]))
            took_us.append(_took_us(item))
    parts = []
    if sums["residency-released"]:
        number = sums["residency-released"]
        parts.append("request ended" if number == 1 else f"{_many(number, 'request')} ended")
    if sums["blocks-released"]:
        parts.append(f"running requests gave back {_many(sums['blocks-released'], 'block')}")
    if causes:
        by = ", ".join(sorted(causes))
        if len(causes) > 1:
            by = ", ".join(f"{_many(blocks, 'block')} {cause}" for cause, blocks in sorted(causes.items()))
        parts.append(f"custody of {_many(causes.total(), 'block')} ended ({by})")
    if sums["receipt"] - sums["failed"]:
        done = _many(sums["receipt"] - sums["failed"], "block")
        longest = f"{'up to ' if len(took_us) > 1 and max(took_us) >= 1000 else ''}{_long(max(took_us))}"
        parts.append(f"{done} zeroed in {longest}, {' or '.join(sorted(levels))}")
    if sums["failed"]:
        parts.append(f"{_many(sums['failed'], 'block')} not shown to be zeroed")
    return f"{body['tenant']}: {', '.join(parts) or 'nothing changed'}"


def _copies(what: str) -> Callable[[Body], str]:
    def says(body: Body) -> str:
        number, blocks = _many(len(body["numbers"]), "copy", "copies"), sum(map(int, body["blocks_each"]))
        cause = _why(body, "cause")
        does = what if what.startswith("ended") else f"{_verb(len(body['numbers']), 'were')} {what}"
        return f"{number} of {_many(blocks, 'block')} of {_whose(body)} {does} tier {body['tier']}{cause}"

    return says


def _transfer(body: Body) -> str:
    way = {"store": "to", "restore": "from"}.get(body["action"], "at")
    what = f"{_blocks(body)} of {body['tenant']}"
    if body["choice"] != "transfer":
        return f"{what} not copied {way} tier {body['tier']}{_why(body)}"
    outcome = {"done": "copied", "partial": f"({_number(body.get('part_blocks', 0))} of them) copied"}
    return f"{what} {outcome.get(body['outcome'], 'failed to be copied')} {way} tier {body['tier']}{_why(body)}"


def _requested(body: Body) -> str:
    whose = body.get("tenant") or "every tenant"
    due_us = int(body["at_us"]) - int(body["boot_us"]) + int(body["deadline_boot_us"])
    return f"{body['actor']} asked to erase the custody of one {body['selector']} of {whose} by {second(due_us)}"


def _applied(body: Body) -> str:
    copies = sum(map(int, body.get("objects", ())))
    more = f" and {_many(copies, 'copy', 'copies')}" if copies else ""
    return (
        f"erasure {body['erasure']} took effect on {_blocks(body)}{more} of {_whose(body)}: "
        f"{_many(body['requests'], 'request')} aborted, {_many(body['finishing'], 'request')} finishing"
    )


def _erased(body: Body) -> str:
    left = f", {_many(body['remaining'], 'block')} remaining{_why(body)}" if int(body["remaining"]) else ""
    ended = f"{_blocks(body)} of {_whose(body)} ended"
    return f"erasure {body['erasure']} was answered as {body['outcome']}: {ended}{left}"


def _overdue(body: Body) -> str:
    if not int(body["residencies"]):
        return f"pool {body['pool']} has ended every hold that was past its deadline"
    past, number = _long(max(0, int(body["boot_us"]) - int(body["due_boot_us"]))), body["residencies"]
    late = "is past its deadline by" if int(number) == 1 else "are past their deadline, the oldest by"
    return f"{_many(number, 'hold')} of pool {body['pool']} {late} {past}"


def _found(body: Body) -> str:
    what = f"an orphan scan found: {body['orphan']} ({body['cause']})"
    return f"{what}, {_blocks(body)} of {_whose(body)}; {body['action']}, {body['outcome']}"


def _observed(what: str) -> Callable[[Body], str]:
    return lambda body: f"engine {body['engine']}, only observed, {what} {_blocks(body)} of {_whose(body)}"


def _order(body: Body) -> str:
    if body["mode"] == "enforce":
        return f"{body['actor']} ordered that the policy is enforced for every tenant{_why(body)}"
    if body["mode"] == "canary":
        share = f"{int(body['share_millionths']) / 10_000:g} % of sessions"
        whom = f"{_listed(body['tenants'])} and {share}"
        return f"{body['actor']} ordered that the policy is enforced for {whom}{_why(body)}"
    return f"{body['actor']} ordered that the policy is enforced for no tenant{_why(body)}"


def _enforced(body: Body) -> str:
    said = {"monitor": "for no tenant", "enforce": "for every tenant"}
    whom = said.get(body["mode"], f"for {_listed(body['tenants'])} and a share of sessions")
    refused = f", as order {body['order']} is not followed ({body['refused']})" if body.get("refused") else ""
    return f"a worker enforces revision {body['revision']} {whom}{refused}"


def _died(body: Body) -> str:
    return (
        f"a process of {body['worker']} ended without saying so; closed as unproven: "
        f"{_many(body['residencies'], 'request')}, {_blocks(body)}, {_many(body.get('copies', 0), 'copy', 'copies')}"
    )


def _started(body: Body) -> str:
    origin = f" ({body['origin']} traffic)" if body.get("origin") else ""
    return f"worker {body['worker']}{origin} began with {_blocks(body)} on {_many(body['shards'], 'shard')}"


def _key_event(body: Body) -> str:
    service = {
        "owed": "; its key service is to destroy the key that wraps it",
        "still-owed": "; its key service is still to destroy the key that wraps it",
        "pending": "; its key service destroys the key that wraps it later",
        "gone": "; its key service has destroyed the key that wraps it",
    }.get(body.get("in_service", ""), "")
    return f"key epoch {body['epoch']} of {_whose(body)}: {body['action']}, by {body['actor']}{service}"


def _handed_over(body: Body) -> str:
    what, peer = _many(body["blocks"], "block"), body["peer"] or "another worker"
    was = _verb(body["blocks"], "were")
    if body["step"] == "refused":
        return f"a hand-over of {what} of {body['tenant']} with {peer} was refused: {body['reason']}"
    way = {"offered": f"{was} offered to", "given": f"{was} given to", "received": "came from"}[body["step"]]
    return f"{what} of {body['tenant']}, prefilled once, {way} {peer}"


def _restricted(body: Body) -> str:
    word = "stopped using" if body["change"] == "restricted" else "uses again"
    return f"a worker {word} what one subject of {body['tenant']} left (case {body['case_id']})"


SENTENCES: dict[str, Callable[[Body], str]] = {
    "access": _access,
    "principal-changed": _principal,
    "attempts-refused": lambda body: (
        f"{_many(body['attempts'], 'attempt')} to identify refused ({body['reason']}), from {body['source']}"
    ),
    "release-step": lambda body: f"{body['actor']} {_done(body)} revision {body['revision']} of the policy",
    "policy-staged": lambda body: f"revision {body['revision']} of the policy took effect for {body['stage']}",
    "policy-activated": lambda body: f"revision {body['revision']} of the policy took effect for every tenant",
    "policy-text": lambda body: (
        f"a policy's text was recorded, part {_number(body['number'])} of {_many(body['of'], 'part')}"
    ),
    "enforcement-ordered": _order,
    "enforcement-changed": _enforced,
    "grants-revoked": lambda body: (
        f"{body['actor']} revoked {_listed(body['ids'])}: nobody reuses blocks through them from now on"
    ),
    "retention-purged": lambda body: (
        f"{body['actor']} and {body['approver']} dropped the content of leaf {_number(body['first'])} to "
        f"leaf {_number(int(body['below']) - 1)} of {_log(body['of_log'])}"
    ),
    "legal-hold": lambda body: (
        f"{body['actor']}: legal hold {body['hold']} {body['action']}, on the records of "
        f"{body.get('tenant') or 'every tenant'}"
    ),
    "order-signed": lambda body: (
        f"{body['actor']} signed the order in leaf {_number(body['idx'])} of "
        f"{'the system log' if body['tenant'] is None else body['tenant']} ({body['of_kind']}): it counts from now on"
    ),
    "subject-unlinked": lambda body: (
        f"{body['actor']} unlinked a subject of {body['tenant']}: "
        f"{_many(body['pseudonyms'], 'pseudonym')} {_verb(body['pseudonyms'], 'name')} nobody from now on"
    ),
    "sink-changed": lambda body: f"{body['actor']} {_done(body)} the sink {body['sink']}{_why(body)}",
    "report-schedule-changed": lambda body: (
        f"{body['actor']} {_done(body)} the schedule {body['schedule']} ({body['framework']}, {body['every']})"
    ),
    "scheduled-report-made": lambda body: (
        f"the schedule {body['schedule']} made the report {body['report']} ({body['framework']}, {body['opinion']})"
    ),
    "report-delivery": lambda body: (
        f"the report {body['report']} for {body['destination']}: {body['action']}{_why(body)}"
    ),
    "clock-confirmed": lambda body: (
        f"{body['actor']} confirmed a clock that is {_many(body['ahead_seconds'], 'second')} ahead{_why(body)}"
    ),
    "log-broken": lambda body: (
        f"{body['actor']} went on although the log of {_many(body['lost_size'], 'root leaf')} is lost from root leaf "
        f"{_number(body['base_size'])} on{_why(body)}"
    ),
    "schema-changed": lambda body: (
        f"{body['actor']}: {', '.join(body['tables'])} changed to revision {body['revision']}, "
        f"{_many(body['rows'], 'row')} copied"
    ),
    "signing-key": lambda body: f"{body['actor']} {_done(body)} the key that signs checkpoints",
    "report-key": lambda body: f"{body['actor']} {_done(body)} the key that signs reports",
    "worker-started": _started,
    "worker-stopped": lambda body: (
        f"worker {body['worker']} stopped ({body['cause']}) after it had handed out {_blocks(body, 'allocated')}"
    ),
    "worker-died": _died,
    "worker-returned": lambda body: f"a process of {body['worker']} that counted as dead wrote again",
    "worker-closing-asked": lambda body: (
        f"{body['actor']} asked that a process of {body['worker']} be declared dead{_why(body)}"
    ),
    "issuer-assigned": lambda body: f"tenants of the issuer {body['issuer']} are named as {body['tenants']} ids",
    "key-event": _key_event,
    "keys-dropped": lambda body: (
        f"a worker holds no secret any more that an order on keys ended ({_many(body['epochs'], 'epoch')} by itself)"
    ),
    "keys-ordered": lambda body: (
        f"{body['actor']} ordered every worker to {body['action']} the keys of {body['of_tenant']}{_why(body)}"
    ),
    "decision": _decision,
    "hit-counted": _counted,
    "hit-counters": _counted,
    "residency-opened": _opened,
    "request-monitored": _monitored,
    "blocks-assigned": lambda body: (
        f"{_blocks(body)} that a request of {body['tenant']} was handed {_verb(body['blocks'], 'are')} "
        f"{body['owner']}'s ({body['classification']})"
    ),
    "blocks-attached": lambda body: (
        f"{body['tenant']}: a running request went on with {_blocks(body)} that another had published"
    ),
    "residency-released": _released,
    "blocks-released": lambda body: f"{body['tenant']}: a running request gave back {_blocks(body)} ({body['cause']})",
    "holds-narrowed": lambda body: (
        f"revision {body['revision']} ended holds of {body['tenant']} earlier; "
        f"{_many(len(body['holds']), 'hold')} {_verb(len(body['holds']), 'are')} left"
    ),
    "custody-ended": lambda body: f"custody of {_blocks(body)} of {body['tenant']} ended ({body['cause']})",
    "custody-changed": _changed,
    "receipt": _receipt,
    "integrity-mismatch": lambda body: (
        f"{_blocks(body)} of {body['tenant']} {_verb(body['blocks'], 'were')} not as published, and not reused; "
        f"{_many(body['requests'], 'running request')} {_verb(body['requests'], 'refer')} to them"
    ),
    "copies-stored": _copies("sealed into"),
    "copies-ended": _copies("ended in"),
    "blocks-handed-over": _handed_over,
    "tier-inherited": lambda body: (
        f"{_many(len(body['copies']), 'copy', 'copies')} of {_whose(body)} in tier {body['tier']} "
        f"{_verb(len(body['copies']), 'were')} left by worker {body['left_by_worker'] or '(unknown)'}, which died: "
        + ("taken over" if body["outcome"] == "restored" else "ended")
    ),
    "copies-destroyed": _copies("destroyed in"),
    "copies-locked": _copies("ended, and their bytes are locked by the store of"),
    "transfer-decided": _transfer,
    "erasure-requested": _requested,
    "erasure-applied": _applied,
    "erasure-remaining": lambda body: (
        f"{_blocks(body)} of {_whose(body)} {_verb(body['blocks'], 'stay')} after erasure {body['erasure']}{_why(body)}"
    ),
    "erasure-reread": lambda body: (
        f"{_blocks(body, 'checked')} that erasure {body['erasure']} ended for {_whose(body)} "
        f"{_verb(body['checked'], 'were')} read back: "
        f"{_many(body['nonzero'], 'byte')} not zero"
    ),
    "erasure-completed": _erased,
    "epoch-raised": lambda body: (
        f"routers' names of {_epoch_scope(body)} end with epoch {_number(body['number'])}{_for_erasure(body)}"
    ),
    "epochs-taken": lambda body: f"door {body['door']} gives routers names of epoch {_number(body['version'])}",
    "hints-clipped": lambda body: f"door {body['door']} clipped hints of clients: {_clipped(body)}",
    "route-sent": _sent,
    "route-found": lambda body: (
        f"a request of {_whose(body)} came by a door and found {_number(body['found_tokens'])} of "
        f"{_many(body['prompt_tokens'], 'token')}; {_many(body['queue'], 'request')} {_verb(body['queue'], 'were')} "
        "here before it"
    ),
    "custody-overdue": _overdue,
    "orphan-scanned": lambda body: (
        f"a scan ({body['mode']}) of {_many(body['residencies'], 'request')} and {_blocks(body)} found "
        f"{_many(body['findings'], 'orphan')}"
    ),
    "orphan-found": _found,
    "spill-started": lambda body: (
        f"events from sequence {_number(body['first_sequence'])} on went to the local spill{_why(body, 'cause')}"
    ),
    "replay-completed": lambda body: (
        f"a spill was read back: {_many(body['added'], 'leaf', 'leaves')} added, "
        f"{_many(body['duplicates'], 'leaf', 'leaves')} already there"
    ),
    "gap": lambda body: (
        f"event {_number(body['first_sequence'])} to event {_number(body['last_sequence'])} were lost"
        f"{_why(body, 'cause')}"
    ),
    "withdrawn": lambda body: (
        f"event {_number(body['of_sequence'])} of {_whose(body)} was recorded after it had been refused: "
        "its act did not happen"
    ),
    "observation-started": lambda body: (
        f"worker {body['worker']} began to observe the engine at {body['endpoint']}, which it does not govern"
    ),
    "observed-stored": _observed("stored"),
    "observed-removed": lambda body: (
        f"{_observed('removed')(body)} ({body['cause']}), {_many(body['late'], 'block')} late"
    ),
    "observed-overdue": lambda body: f"{_observed('still holds')(body)} past the deadline",
    "observation-gap": lambda body: (
        f"batch {_number(body['first_batch'])} to batch {_number(body['last_batch'])} of engine {body['engine']} were "
        f"not seen{_why(body, 'cause')}"
    ),
    "case-opened": lambda body: (
        f"{body['actor']} opened case {body['case_id']}: a subject of {body['tenant']} asks for {body['subject_right']}"
    ),
    "case-step": lambda body: (
        f"{body['actor']}, case {body['case_id']} of {body['tenant']}: {body['step']}"
        + (f", {body['outcome']}" if body.get("outcome") else "")
    ),
    "processing-restricted": _restricted,
}
"""A kind of leaf to its sentence."""
