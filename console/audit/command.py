"""`kvcustody audit`: the command group. Every answer comes from `kvcustody.audit` and is only rendered here."""

from __future__ import annotations

import typer

from kvcustody.console.api.group import OperationGroup
from kvcustody.console.lazy import Lazy


def _command(target: str, example: str) -> Lazy:
    return Lazy(f"kvcustody.console.audit.{target}", example=f"kvcustody audit {example}")


class AuditGroup(OperationGroup):
    """The commands of `kvcustody audit`."""

    table = {  # noqa: RUF012
        "status": _command("query:status", "status --json"),
        "tail": _command("query:tail", "tail --follow --kind decision"),
        "kinds": _command("kinds:kinds", "kinds receipt --json"),
        "prove": _command("query:prove", "prove tenant/acme 17 --out leaf-17"),
        "times": _command("query:times", "times --tenant acme --json"),
        "fsck": _command("fsck:check", "fsck --key ledger.vkey --note checkpoint-of-last-week"),
        "export": _command("export:export", "export ./evidence --since 2026-10-01 --until 2026-11-01"),
        "verify": _command("export:verify", "verify ./evidence --key ledger.vkey --witness witness.vkey"),
        "tiles": _command("tiles:tiles", "tiles ./tiles --log tenant/acme"),
        "timestamp": _command(
            "signing:timestamp",
            "timestamp --url http://tsa.example.org/ --certificate tsa.pem --roots roots.pem",
        ),
        "sign": _command("signing:sign", "sign --signing-key kvcustody-signing.key"),
        "keys": _command("signing:keys", "keys --key ledger.vkey"),
        "rotate-key": _command("signing:rotate", "rotate-key --signing-key signing.key --actor custodian"),
        "confirm-break": _command(
            "signing:confirm",
            "confirm-break --signing-key signing.key --actor ops --reason 'failover of 3 May'",
        ),
        "redact": _command("retention:redact", "redact acme alice --actor dpo --reason 'request 7'"),
        "purge": _command(
            "retention:drop",
            "purge --until 2025-11-01 --to ./purged --key ledger.vkey --actor ops --approver dpo",
        ),
        "ship": _command("siem:ship", "ship positions.json --shape ocsf --follow | collector"),
        "push": _command(
            "siem:push", "push ./webhook --url https://siem.example.org/in --signing-key hook.key --follow"
        ),
        "hold": Lazy("kvcustody.console.audit.retention:hold"),
        "sink": Lazy("kvcustody.console.audit.siem:sink"),
        "recompute": Lazy("kvcustody.console.coverage.command:recompute", epilog="RECOMPUTE"),
    }


app = typer.Typer(
    cls=AuditGroup,
    no_args_is_help=True,
    help="Look into the ledger, prove its entries, export it and check it.",
    epilog="docs/tutorials/check-an-export.md leads an auditor from an export and a key to a verdict.",
)


@app.callback()
def _audit() -> None:
    pass
