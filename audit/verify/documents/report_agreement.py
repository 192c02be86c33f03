"""A report's own evidence, from its JSON only: sums, draws, and leaves under its checkpoint.

It takes no package, so that the stand-alone verifier has it too (`audit/exports/amalgamate.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvcustody.audit.evidence.coverage.custody_units import DEVICE_TIER
from kvcustody.audit.kinds import log_of, tenant_of
from kvcustody.audit.reports.document import Facts
from kvcustody.audit.reports.sampling.attribute_size import RISK_PPM, attribute_sample_size, upper_limit_ppm
from kvcustody.audit.reports.sampling.strata import draw_strata
from kvcustody.audit.reports.sections.exceptions import MEANINGS
from kvcustody.audit.tlog.backend import parse_json
from kvcustody.audit.tlog.checkpoint import SignedCheckpoint, open_checkpoint
from kvcustody.audit.tlog.root_log import check_leaf, parse_leaf_proof
from kvcustody.audit.tlog.signed_note import VerifierKey
from kvcustody.errors import LedgerError

_VERDICTS = ("in_time", "late", "failed", "missing", "unproven", "overdue")
_CAUSES = ("by_deadline", "by_eviction", "by_erasure", "by_pressure", "by_death", "by_other")
_STRATUM = ("tier", "tenant", "classification", "cause")
_WINDOW = ("longest_us", "at_us", "signed_us")


def report_disagreements(report: Facts) -> list[str]:
    """Return every identity that does not hold."""
    disagreements: list[str] = []
    checks = (
        *(_checkpoint, _coverage, _parts, _population, _sample),
        *(_tiers, _read, _storage, _board, _window),
    )
    for each in checks:
        disagreements += each(report)
    return disagreements


class ProvedLeaf(NamedTuple):
    """A sampled leaf under the checkpoint: its drawn member, its place, and its content."""

    item: Mapping[str, Any]
    where: str
    body: Mapping[str, Any]


def stated_checkpoint(report: Facts, keys: Sequence[VerifierKey], problems: list[str]) -> SignedCheckpoint:
    """Return the checkpoint on its note; raises `NoteError` unless one of these keys signed it."""
    point = report["boundary"]["checkpoint"]
    signed = open_checkpoint(point["note"].encode(), keys)
    head = signed.checkpoint.head
    stated = (signed.checkpoint.origin, head.size, head.root.hex())
    if stated != (point["origin"], point["size"], point["root"]):
        problems.append("the checkpoint is not the one that its note states")
    return signed


def proved_leaves(
    report: Facts, keys: Sequence[VerifierKey], signed: SignedCheckpoint, problems: list[str]
) -> Iterator[ProvedLeaf]:
    """Yield every sampled leaf whose place is proved. All stand under one note, whose signature is checked once."""
    note = report["boundary"]["checkpoint"]["note"].encode()
    for item in report["sample"]:
        for leaf in item["leaves"]:
            where, data = f"leaf {leaf['idx']} of `{leaf['log']}`", leaf["leaf"].encode()
            try:
                proof = parse_leaf_proof(leaf["proof"].encode())
                sealed = check_leaf(proof, data, keys, signed=signed if proof.head.note == note else None)
            except LedgerError as problem:
                problems.append(f"{where}: {problem.message}")
                continue
            body = parse_json(data)
            if (sealed.name, proof.index) != (leaf["log"], leaf["idx"]):
                problems.append(f"{where} is leaf {proof.index} of `{sealed.name}`")
            if proof.head.note != note:
                problems.append(f"{where} is proved under another checkpoint")
            if body["kind"] != leaf["kind"]:
                problems.append(f"{where} is of kind `{body['kind']}`")
            yield ProvedLeaf(item, where, body)


def _checkpoint(report: Facts) -> Iterator[str]:
    asked, boundary = report["asked"], report["boundary"]
    if boundary["checkpoint"]["size"] != asked["checkpoint"]:
        yield "the report was asked for as of another checkpoint"
    if boundary["extends"] != asked["extends"]:
        yield "the report was asked to extend another checkpoint"
    if asked["since_us"] >= asked["until_us"]:
        yield "the period ends before it begins"


def _coverage(report: Facts) -> Iterator[str]:
    total: dict[str, Any] = dict.fromkeys(report["total"], 0) | {"tenant": "*", "classification": "*"}
    for row in report["coverage"]:
        yield from _row(row)
        for name in _figures(row):
            added = total[name] + row[name]
            total[name] = max(total[name], row[name]) if name == "fence_us_max" else added
    if total != report["total"]:
        yield "the total is not the sum of the coverage by tenant and classification"


def _row(row: Facts) -> Iterator[str]:
    who = f"`{row['tenant']}`, `{row['classification']}`"
    if sum(row[name] for name in _VERDICTS) != row["due"]:
        yield f"verdicts of {who} do not add up to what was due"
    if not 0 <= row["covered"] <= row["in_time"] or row["in_time"] - row["covered"] > row["disputed"]:
        yield f"covered units of {who} are not those in time and not disputed"
    if any(row[name] < 0 for name in _figures(row)):
        yield f"a figure of {who} is below zero"


def _figures(row: Facts) -> list[str]:
    return [name for name in row if name not in ("tenant", "classification")]


def _parts(report: Facts) -> Iterator[str]:
    total, bins = report["total"], report["timeline"]
    if [sum(item[name] for item in bins) for name in ("due", "covered")] != [total["due"], total["covered"]]:
        yield "the parts of the period do not add up to the total"
    if any(item["due"] != item["covered"] + item["uncovered"] for item in bins):
        yield "a part of the period is not covered and uncovered together"
    uncovered, listed = total["due"] - total["covered"], sum(item["units"] for item in report["exceptions"])
    if listed > uncovered or (not report["exceptions_left_out"] and listed != uncovered):
        yield "the exceptions do not add up to what is not covered"
    if any(item["meaning"] != MEANINGS.get(item["verdict"]) for item in report["exceptions"]):
        yield "an exception is explained by other words than those of its verdict"
    lags = report["timeliness"]
    if not lags["p50_us"] <= lags["p99_us"] <= lags["max_us"]:
        yield "the times from due to destroyed are out of order"


def _population(report: Facts) -> Iterator[str]:
    facts, again = report["population"], report["recount"]
    if facts["units"] != report["total"]["due"]:
        yield "the population has other units than coverage"
    if not 0 <= facts["custodies"] <= facts["units"]:
        yield "the population has more custodies than units"
    if (again is None) == report["asked"]["recount"]:
        yield "a recount is there that was not asked for, or the reverse"
    if again is not None and not again["differences"] and again["digest"] != facts["digest"]:
        yield "the recount names no difference, and has another digest"


def _sample(report: Facts) -> Iterator[str]:
    parameters, sampling, strata = report["asked"], report["sampling"], report["sampling"]["strata"]
    members = [stratum["members"] for stratum in strata]
    stated = bool(parameters["risk_ppm"]) and bool(parameters["tolerable_ppm"])
    if bool(parameters["risk_ppm"]) != bool(parameters["tolerable_ppm"]) or (parameters["expected"] and not stated):
        yield "a risk is stated without a tolerable rate, or the reverse"
    copies = sum(row["due"] for row in report["tiers"]["rows"])
    if sum(members) != report["population"]["custodies"] + copies:
        yield "the strata are not the population"
    size = parameters["sample"]
    if stated:
        size = attribute_sample_size(parameters["risk_ppm"], parameters["tolerable_ppm"], parameters["expected"])
    if sampling["size"] != size or sampling["risk_ppm"] != (parameters["risk_ppm"] or RISK_PPM):
        yield "the sample is of another size than was asked for"
        return
    draws = draw_strata(parameters["seed"], size, members)
    drawn = [(number, place) for number, draw in enumerate(draws) for place in draw.places]
    counted = [(stratum["drawn"], stratum["duplicates"]) for stratum in strata]
    if counted != [(len(draw.places), draw.duplicates) for draw in draws] or drawn != [
        (item["stratum"], item["place"]) for item in report["sample"]
    ]:
        yield "the sample is not the one that the seed draws from the population"
        return
    for number, stratum in enumerate(strata):
        mine = [item["custody"] for item in report["sample"] if item["stratum"] == number]
        if any(each[name] != stratum[name] for each in mine for name in _STRATUM):
            yield f"a drawn member is of another stratum than number {number}"
        if stratum["deviations"] != sum(not each["covered"] for each in mine):
            yield f"deviations of stratum {number} are not those of its drawn members"
    deviations, taken = (sum(one[name] for one in strata) for name in ("deviations", "drawn"))
    limit = upper_limit_ppm(deviations, taken, sampling["risk_ppm"])
    if (sampling["deviations"], sampling["upper_limit_ppm"]) != (deviations, limit):
        yield "what the sample says of the population does not follow from it"


def _tiers(report: Facts) -> Iterator[str]:
    rows = report["tiers"]["rows"]
    for row in rows:
        verdicts = sum(row[name] for name in ("covered", "late", "open", "unproven", "disputed"))
        if verdicts != row["due"] or not 0 <= row["waiting"] <= row["open"]:
            yield f"verdicts of copies in tier `{row['tier']}` do not add up to what was due"
    by_tier: dict[tuple[Any, ...], int] = {}
    for stratum in report["sampling"]["strata"]:
        if stratum["tier"] != DEVICE_TIER:
            key = tuple(stratum[name] for name in _STRATUM[:3])
            by_tier[key] = by_tier.get(key, 0) + stratum["members"]
    if by_tier != {tuple(row[name] for name in _STRATUM[:3]): row["due"] for row in rows}:
        yield "the strata of copies are not the copies that were due, by tier, tenant and classification"
    due: dict[str, int] = {}
    for row in rows:
        name = f"copies due in {row['tier']} "
        due[name] = due.get(name, 0) + row["due"]
    stated = {
        f"{balance['name'].partition(' = ')[0]} ": (balance["left"], balance["right"])
        for balance in report["tiers"]["balances"]
        if balance["name"].startswith("copies due in ")
    }
    if stated != {name: (copies, copies) for name, copies in due.items()}:
        yield "the identities of copies that were due are not those of the tiers"


def _storage(report: Facts) -> Iterator[str]:
    for row in report["storage"]:
        is_whole = sum(row[name] for name in _CAUSES) == row["custodies"]
        if not is_whole or max(row["unaged"], row["beyond_limit"]) > row["custodies"]:
            yield f"what ended custody of classification `{row['classification']}` does not add up"
        if not row["age_us_p50"] <= row["age_us_p99"] <= row["age_us_max"]:
            yield f"ages of classification `{row['classification']}` are out of order"
    custodies = sum(row["custodies"] + row["overdue"] for row in report["storage"])
    if custodies != report["population"]["custodies"]:
        yield "the classifications do not have the custodies of the population"


def _board(report: Facts) -> Iterator[str]:
    """What the first page says follows from the sections behind it, but for when workers were at work."""
    board, erasures, workers = report["board"], report["activity"]["erasures"], report["boundary"]["workers"]
    on_time = sum(one["state"] == "complete" for one in erasures)
    if (board["erasures"], board["erasures_on_time"]) != (len(erasures), on_time):
        yield "the first page has other erasures than the report"
    due = {row["tenant"] for row in report["coverage"] if row["due"]}
    logs = [log["name"] for log in report["boundary"]["logs"]]
    own = {tenant_of(name) for name in logs if name.startswith(log_of(""))}
    if (board["tenants"], board["tenants_due"]) != (len(due | own), len(due)):
        yield "the first page has other tenants than logs and coverage"
    seen = [one for one in workers if not one["end"].startswith("died")]
    if not 0 <= board["workers_scanned"] <= min(board["workers"], len(seen)):
        yield "the first page covers more workers than did not die"
    if not board["workers_scanned"] <= board["workers"] <= len(workers):
        yield "the first page has more workers than the boundary"
    scanned = board["workers"] - len(report["unscanned"])
    if report["asked"]["tenant"] is None and scanned > board["workers_scanned"] + len(workers) - len(seen):
        yield "the first page covers fewer workers than were scanned and did not die"
    if board["trend"] and [board["trend"][-1][name] for name in _TREND] != [
        *(report["asked"][name] for name in _TREND[:2]),
        *(report["total"][name] for name in _TREND[2:]),
    ]:
        yield "the last period of the trend is not the report's own"


_TREND = ("since_us", "until_us", "due", "covered")


def _window(report: Facts) -> Iterator[str]:
    """Yield problems unless the signature that closed the window is of this checkpoint or earlier, and the leaf in the
    period.
    """
    window = report["window"]
    if not any(window[name] for name in _WINDOW) and not window["log"]:
        return
    if window["longest_us"] != window["signed_us"] - window["at_us"] or window["longest_us"] <= 0:
        yield "the longest window is not the time from its leaf to its signature"
    if window["signed_us"] > report["boundary"]["checkpoint"]["signed_us"]:
        yield "the longest window ends later than the report's checkpoint was signed"
    if not report["asked"]["since_us"] <= window["at_us"] < report["asked"]["until_us"]:
        yield "the longest window begins outside the period"
    if window["log"] not in {log["name"] for log in report["boundary"]["logs"]}:
        yield "the longest window is of a log that is not under the checkpoint"


def _read(report: Facts) -> Iterator[str]:
    for row in report["read_back"]:
        pairs = (("receipts_unread", "receipts"), ("blocks_read", "blocks"), ("bytes_read", "bytes"))
        if any(row[part] > row[whole] for part, whole in pairs):
            yield f"more was read back than receipts of level `{row['level']}` have"
    for balance in report["decided"]["balances"]:
        if balance["right"] != sum(item["residencies"] for item in report["decided"]["residencies"]):
            yield "residencies by rule are not those of the identity"
