"""An erasure's certificate as one HTML page that prints: what was asked, what was done, what stays, how to check it.

1. Everything on it is in the certificate; every text is escaped, and the page loads nothing from anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from kvcustody.audit.evidence.processes.enforcement import NotEnforced, unnamed_qualification
from kvcustody.audit.evidence.processes.marked_processes import MarkedProcess, history
from kvcustody.times import TO_THE_SECOND, readable

_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;color:#1a1a1a;background:#fff;max-width:52rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.6rem;margin-bottom:0}h2{font-size:1.15rem;margin-top:2rem}
table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:.3rem .6rem;border-bottom:1px solid #ccc;
vertical-align:top}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
code{font-size:.9em;overflow-wrap:anywhere}.state{font-size:1.15rem;font-weight:600}
@media print{body{margin:0;max-width:none}h2{break-after:avoid}tr{break-inside:avoid}}
"""


def render(document: dict[str, Any]) -> str:
    """The page of a certificate."""
    body = document["body"]
    figures, asked = body["figures"], body["request"]
    parts = [
        f"<h1>Erasure {escape(body['erasure'])}</h1>",
        f"<p class=state>{_state(body)}</p>",
        _history(body),
        "<h2>What was asked</h2>",
        _facts(_asked(asked)),
        "<h2>What was done</h2>",
        _facts(_done(body, figures)),
        "<h2>What remains, and why</h2>",
        _table(
            ("reason", "blocks"),
            [*figures["kept"].items(), *_unproven(figures), *_unknown(body)],
            _nothing(body),
        ),
        "<h2>Legal holds</h2>",
        _table(
            ("hold", "on", "since", "reason"),
            [
                (
                    one["hold"],
                    "everything"
                    if one["tenant"] is None
                    else f"{one['tenant']}{', this subject' if one['subject'] else ''}",
                    readable(one["at_us"], f"{TO_THE_SECOND} UTC"),
                    one["reason"],
                )
                for one in body.get("holds", ())
            ],
            "none: nothing binds the ledger's record of it",
        ),
        "<h2>Workers</h2>",
        _table(
            ("worker", "answer", "at", "blocks ended", "remaining", "reason"),
            [
                (
                    one["worker"],
                    one["outcome"] or "none yet",
                    readable(one["at_us"], f"{TO_THE_SECOND} UTC", none=""),
                    one["blocks"],
                    one["remaining"],
                    one["reason"],
                )
                for one in body["workers"]
            ],
            "no worker had memory when it was requested",
        ),
        "<h2>How to check it</h2>",
        "<p>The certificate carries the ledger's leaves with proofs of their place. With the document and the ledger's "
        "public key alone:</p><pre><code>kvcustody erasure verify certificate.json --key ledger.vkey</code></pre>",
        _facts(
            [
                ("root checkpoint", f"{body['ledger']['checkpoint_size']} root leaves"),
                ("leaves carried", str(len(body["leaves"]))),
                ("logs", ", ".join(sorted(body["ledger"]["heads"]))),
                ("signed by", document["signature"]["name"]),
            ]
        ),
        "<h2>What it does not say</h2>",
        "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in body["limits"]) + "</ul>",
    ]
    title = f"Erasure {escape(body['erasure'])}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _state(body: dict[str, Any]) -> str:
    if body["outcome"] == "complete":
        return "Complete: every worker that owed an answer has given it."
    away = [*body["waiting"], *body["unreachable"]]
    if away:
        return f"Partial: no answer from {escape(', '.join(away))}."
    return "Partial: some custody has no proof of its end."


def _history(body: dict[str, Any]) -> str:
    """What of the ledger no engine at work recorded, and when policies were not enforced, where it says so."""
    marked = tuple(MarkedProcess(**one) for one in body.get("marked", []))
    spans = tuple(NotEnforced(**one) for one in body.get("monitored", []))
    said = (history(marked) if marked else "", unnamed_qualification(spans))
    return "".join(f"<p class=state>{escape(text)}</p>" for text in said if text)


def _asked(asked: dict[str, Any]) -> list[tuple[str, str]]:
    made = [("kind", asked["selector"]), ("tenant", asked["tenant"] or "any")]
    made += [(name, asked[name]) for name in ("subject", "session") if asked[name]]
    if asked["detail"] not in ("", "{}"):
        made.append(("narrowed to", asked["detail"]))
    return [
        *made,
        ("commitment", asked["commitment"]),
        ("requested by", asked["actor"]),
        ("requested", readable(asked["at_us"], f"{TO_THE_SECOND} UTC")),
        ("deadline", readable(asked["deadline_us"], f"{TO_THE_SECOND} UTC")),
    ]


_EVIDENCE = ("zeroed", "unlinked", "key_destroyed", "waiting")


def _done(body: dict[str, Any], figures: dict[str, Any]) -> list[tuple[str, str]]:
    population = body["population"]
    made = [
        ("residencies of the selector", str(population["residencies"] or "not counted")),
        ("blocks covered", str(figures["units"])),
        ("blocks destroyed", str(figures["destroyed"])),
    ]
    made += [(f"… verification `{level}`", str(count)) for level, count in figures["by_level"].items()]
    made += [(f"objects in tier `{name}`", str(count)) for name, count in figures["tiers"].items()]
    for tier, copies in figures.get("copies", {}).items():
        said = [f"{copies[name]} {name.replace('_', ' ')}" for name in _EVIDENCE if copies[name]]
        made.append((f"copies ended in tier `{tier}`", ", ".join([str(copies["ended"]), *said])))
    return [
        *made,
        ("bytes overwritten, all shards", str(figures["bytes"])),
        ("receipts", str(figures["receipts"])),
        ("read back afterwards, still clean", f"{figures['reread_blocks']} blocks"),
        ("bytes not zero when read back", str(figures["reread_nonzero"])),
    ]


def _unproven(figures: dict[str, Any]) -> list[tuple[str, int]]:
    return [("no receipt: unproven", figures["unproven"])] if figures["unproven"] else []


def _unknown(body: dict[str, Any]) -> list[tuple[str, str]]:
    """Workers that have not answered: what remains there is unknown."""
    away = sorted({*body["waiting"], *body["unreachable"]})
    return [(f"no answer from {name}", "unknown") for name in away]


def _nothing(body: dict[str, Any]) -> str:
    """What is said where nothing is listed: only an erasure that is complete shows that nothing remains."""
    return "nothing remains" if body["outcome"] == "complete" else "unknown: the erasure is not complete"


def _facts(rows: Iterable[tuple[str, str]]) -> str:
    lines = (
        f"<tr><th scope=row>{escape(name)}</th><td><code>{escape(value)}</code></td></tr>"
        for name, value in rows
    )
    return f"<table><tbody>{''.join(lines)}</tbody></table>"


def _table(head: tuple[str, ...], rows: list[Any], nothing: str) -> str:
    if not rows:
        return f"<p>{escape(nothing)}</p>"
    heads = "".join(f"<th scope=col>{escape(name)}</th>" for name in head)
    lines = ("".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
