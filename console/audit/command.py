"""`kvcustody audit`: the command group. Every answer is a call of `kvcustody.audit`; here it is only rendered."""

from __future__ import annotations

from collections.abc import Callable

import typer

from kvcustody.console.audit import export, signing, tiles
from kvcustody.console.audit import fsck as check
from kvcustody.console.audit import query as find
from kvcustody.console.audit import retention as keep
from kvcustody.console.audit import siem as ship
from kvcustody.console.audit import signing as anchor
from kvcustody.console.coverage import command as coverage

app = typer.Typer(
    no_args_is_help=True,
    help="Look into the ledger, prove what it says, export it and check it.",
    epilog="docs/audit/walkthrough.md takes an auditor from an export and a key to a verdict.",
)
_COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    "status": (find.status, "status --json"),
    "tail": (find.tail, "tail --follow --kind decision"),
    "query": (find.query, "query --tenant acme --outcome deny --since 2026-11-20 --json"),
    "prove": (find.prove, "prove tenant/acme 17 --out leaf-17"),
    "fsck": (check.check, "fsck --key ledger.vkey --note checkpoint-of-last-week"),
    "export": (export.export, "export ./evidence --since 2026-10-01 --until 2026-11-01"),
    "verify": (export.verify, "verify ./evidence --key ledger.vkey --witness witness.vkey"),
    "tiles": (tiles.tiles, "tiles ./tiles --log tenant/acme"),
    "timestamp": (
        anchor.timestamp,
        "timestamp --url http://tsa.example.org/ --certificate tsa.pem --roots roots.pem",
    ),
    "sign": (signing.sign, "sign kvcustody-signing.key"),
    "keys": (signing.keys, "keys --key ledger.vkey"),
    "rotate-key": (signing.rotate, "rotate-key signing.key --actor custodian"),
    "redact": (keep.redact, "redact acme alice --actor dpo --reason 'request 7'"),
    "purge": (
        keep.drop,
        "purge --before 2025-11-01 --export ./evidence --key ledger.vkey --actor ops --approver dpo",
    ),
    "ship": (ship.ship, "ship positions.json --shape ocsf --follow | collector"),
    "push": (ship.push, "push ./webhook --url https://siem.example.org/in --key-file hook.key --follow"),
}
for _name, (_call, _example) in _COMMANDS.items():
    app.command(_name, epilog=f"Example: `kvcustody audit {_example}`")(_call)
app.add_typer(keep.hold, name="hold")
app.add_typer(ship.sink, name="sink")
app.command(name="recompute", epilog=coverage.RECOMPUTE)(coverage.recompute)
