"""A record of processing's own evidence, from its JSON only; `governance.processing` defines the record.

It takes no package, so that the stand-alone verifier has it too (`audit/exports/amalgamate.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from kvcustody.audit.reports.document import DocumentKind, Facts

RECORD = DocumentKind("record", "kvcustody/processing-record@1")


def record_disagreements(record: Facts) -> Iterator[str]:
    """Yield the record's contradictions."""
    digests = {one["digest"] for one in record["policies"]}
    known = {one["digest"] for one in record["policies"] if one["source"] != "unknown"}
    if {one["policy_digest"] for one in record["time_limits"]} != known:
        yield "time limits are not of the policies that it names, each"
    if not {one["policy_digest"] for one in record["recipients"]} <= known or record["policy_digest"] not in digests:
        yield "recipients, or the policy, are of a policy that it does not name"
    since_us, until_us = record["since_us"], record["until_us"]
    if any(one["since_us"] >= until_us or 0 < one["until_us"] <= since_us for one in record["policies"]):
        yield "a policy was not in effect in the period"
    sums = [sum(one[name] for one in record["categories"]) for name in ("due", "covered")]
    if sums != [record["due"], record["covered"]] or not 0 <= record["covered"] <= record["due"]:
        yield "the categories do not add up to what was due and covered"
    if (record["role"] == "processor") != bool(record["controllers"]) and record["categories"]:
        yield "a processor names the controllers that it acts for, a controller none"
