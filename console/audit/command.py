"""`kvcustody audit`: the command group. Every answer is a call of `kvcustody.audit`; here it is only rendered."""

from __future__ import annotations

import typer

from kvcustody.console.audit import export, find

app = typer.Typer(
    no_args_is_help=True,
    help="Look into the ledger, prove what it says, export it and check it.",
    epilog="docs/audit-walkthrough.md takes an auditor from an export and a key to a verdict.",
)
_EXAMPLES = {
    "export": "kvcustody audit export ./evidence --since 2026-10-01 --until 2026-11-01",
    "verify": "kvcustody audit verify ./evidence --key ledger.vkey --witness witness.vkey",
    "tail": "kvcustody audit tail --follow --kind decision",
    "query": "kvcustody audit query --tenant acme --outcome deny --since 2026-11-20 --json",
    "prove": "kvcustody audit prove tenant/acme 17 --out leaf-17",
    "status": "kvcustody audit status --json",
}
for _call in (find.status, find.tail, find.query, find.prove, export.export, export.verify):
    app.command(_call.__name__, epilog=f"Example: `{_EXAMPLES[_call.__name__]}`")(_call)
