"""The `kvcustody` command: one name for each room, with a one-sentence summary."""

from __future__ import annotations

import gc
import sys
from typing import Annotated, Any

import typer
import typer.core

from kvcustody._version import __version__
from kvcustody.console.command import say
from kvcustody.console.lazy import ExtendedGroup, Lazy, Needs
from kvcustody.logger import configure_logging

_OPERATIONS = "kvcustody.console.api.group:group_of_operations"
COMMANDS = {
    "up": Lazy(
        "kvcustody.console.up.command:up",
        "Start a whole kvcustody on this machine: a signed ledger, the console, and a worker that serves tenants now.",
    ),
    "demo": Lazy(
        "kvcustody.console.demo.command:app",
        "Whole fleets on this machine, and attacks on a real local engine (of kvcustody[testkit]).",
    ),
    "replay": Lazy(
        "kvcustody.console.replay.command:replay",
        "Replay a multi-tenant workload through the Governor and show what policy, isolation and deletion did.",
    ),
    "simulate": Lazy(
        "kvcustody.console.simulate.command:app",
        "A fleet's expected cache hits, modelled faster than real time.",
    ),
    "size": Lazy(
        "kvcustody.console.size.command:app",
        "Size the KV cache of a model on a device, or the evidence of a workload in a ledger.",
    ),
    "init": Lazy(
        "kvcustody.console.serve.command:init",
        "Prepare a ledger for a control plane, and print a bootstrap key that can only enrol principals.",
        "INIT_EPILOG",
    ),
    "serve": Lazy(
        "kvcustody.console.serve.command:serve",
        "Serve the control plane of one ledger until a signal ends it.",
        "SERVE_EPILOG",
    ),
    "keys": Lazy(
        "kvcustody.console.keys:app",
        "Make and check the root key file: 32 random bytes, mode 0600, on a local disk.",
    ),
    "db": Lazy(
        "kvcustody.console.db.command:app",
        "The ledger's database: schema, roles, partitions by month, and moving it from SQLite to PostgreSQL.",
    ),
    "policy": Lazy(
        "kvcustody.console.policy.command:app",
        "Write, check, review, prove and release the policy: who may reuse whose cached blocks, and for how long.",
    ),
    "workbench": Lazy(
        _OPERATIONS,
        "A policy document as a control plane judges it: validate, lint, test, diff, prove, simulate, explain.",
        below="",
    ),
    "principal": Lazy(
        "kvcustody.console.principal.command:principals",
        "Enrol, list, disable and enable the people and machines that may use a control plane.",
    ),
    "apikey": Lazy(
        "kvcustody.console.principal.keys:keys",
        "Issue, replace, list and revoke API keys: of principals, and of an engine's tenants.",
    ),
    "audit": Lazy(
        "kvcustody.console.audit.command:app",
        "Look into the ledger, prove its entries, export it and check it.",
    ),
    "witness": Lazy(
        "kvcustody.console.witness.command:app",
        "Run a witness (C2SP tlog-witness): a third party that signs that a ledger only grew.",
    ),
    "custody": Lazy(
        _OPERATIONS,
        "Present and past custody: blocks, residencies, totals, refusals, and reuse across tenants.",
        below="",
    ),
    "coverage": Lazy(
        "kvcustody.console.coverage.command:app",
        "Deletion coverage: the share of due custody that ended in time, with evidence.",
    ),
    "report": Lazy(
        "kvcustody.console.report.command:app",
        "Evidence reports for auditors: the same ledger and arguments give the same bytes.",
    ),
    "subject": Lazy(
        "kvcustody.console.subject.command:app",
        "One subject's page for a data-protection officer: what is held, why, until when, and what was erased.",
    ),
    "erasure": Lazy(
        "kvcustody.console.erasure.command:app",
        "Erase everything held of a tenant, subject, session, domain or model, and prove it.",
    ),
    "case": Lazy(
        "kvcustody.console.case.command:app",
        "Subject requests as cases: receipt, identity, the deadline of one month, decision, letter.",
    ),
    "inbox": Lazy(
        "kvcustody.console.inbox:inbox",
        "Open tasks: approvals, consents, missed erasures, and what is about to end.",
        "EPILOG",
    ),
    "scan": Lazy("kvcustody.console.scan.command:app", "Orphans: custody about which two sources disagree."),
    "worker": Lazy(
        "kvcustody.console.worker:app",
        "Workers' processes in a ledger: list those that have not ended, and close dead ones.",
    ),
    "job": Lazy(
        _OPERATIONS,
        "A control plane's jobs, such as checks, exports and reports: list, follow, cancel, fetch their files.",
        below="",
    ),
    "tier": Lazy(
        _OPERATIONS,
        "Tiers: what was stored off the device, what was restored, what was not moved, and why.",
        below="docs/how-to/storage/set-up-tiers.md#why-was-it-moved-or-not explains decisions and figures.",
    ),
    "routes": Lazy(
        _OPERATIONS,
        "Routes: the workers of requests from doors, their cache hits, and incomplete receipts.",
        below="docs/concepts/route-receipts.md says what each figure means.",
    ),
    "showback": Lazy(
        "kvcustody.console.audit.showback:bill",
        "Block-seconds held, prefill seconds saved, taken from others and given to them, by tenant.",
        "EPILOG",
    ),
    "prefixes": Lazy(
        _OPERATIONS,
        "The prefixes most worth keeping, by later reuse.",
        below="docs/how-to/audit/bill-tenants.md#prefixes explains a row; no content is read or shown.",
    ),
    "top": Lazy(
        "kvcustody.console.live.top:top",
        "Watch workers and tenants: hits, time to first token, prefill time avoided, evictions, thrash, waste.",
        "EPILOG",
    ),
    "advise": Lazy(
        "kvcustody.console.live.advise:advise",
        "Seven questions about the cache of running workers or for a trace, answered with the evidence.",
        "EPILOG",
    ),
    "service": Lazy(
        _OPERATIONS,
        "A control plane's health, readiness, metrics, versions and API document.",
        below="",
    ),
    "protocol": Lazy(
        _OPERATIONS,
        "The protocol between workers and their control plane, for authors of workers.",
        below="",
    ),
    "doctor": Lazy(
        "kvcustody.console.doctor.command:doctor",
        "Look for what would stop or weaken kvcustody on this machine, and say what to do about it.",
        "EPILOG",
    ),
    "clock": Lazy(
        "kvcustody.console.clock:app",
        "The clock for deadlines: show it, and confirm this machine's clock.",
    ),
    "version": Lazy(
        "kvcustody.console.version:version",
        "Print the versions that decide how this installation behaves.",
    ),
}


NEEDS = {
    "up": Needs(("torch", "fastapi", "uvicorn", "prometheus_client"), "all"),
    "replay": Needs(("torch",), "engine"),
    "serve": Needs(("fastapi", "uvicorn", "prometheus_client"), "service"),
    "observe": Needs(("zmq",), "events"),
}
_FIRST = {
    "up": "Start with `kvcustody up`: it needs no file, no GPU and no configuration.",
    "replay": "Start with `kvcustody replay`: it needs no file, no GPU and no configuration.",
    "policy": "Start with `kvcustody policy init`: it writes a policy to check, test and prove.",
}
_NEW_OBJECTS = 50_000  # that are not freed again; Python's own number is 700


class Kvcustody(ExtendedGroup):
    """Every command of this package; its help ends with first steps that work on this installation."""

    table = COMMANDS
    elsewhere = dict.fromkeys(("conformance", "known-bugs"), "kvcustody[testkit]")
    needs = NEEDS

    def class_of_group(self, name: str) -> type[typer.core.TyperGroup] | None:
        """Return the class of other packages' groups: doors and others have commands for the operations of their
        name.
        """
        from kvcustody.console.api.group import OperationGroup
        from kvcustody.console.api.operation_commands import commands_of

        return OperationGroup if commands_of(name) else None

    def main(self, *given: Any, **named: Any) -> Any:
        """Run the program. Garbage is collected less often, because imported objects are no garbage."""
        before = gc.get_threshold()
        gc.set_threshold(_NEW_OBJECTS, *before[1:])
        try:
            return super().main(*given, **named)
        finally:
            gc.set_threshold(*before)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help, and what is missing where an extra is not installed."""
        absent = self.absent()
        first = next(text for name, text in _FIRST.items() if name not in absent)
        extras: dict[str, list[str]] = {}
        for name, extra in absent.items():
            extras.setdefault(extra, []).append(f"`{name}`")
        more = [f"{', '.join(names)}: `pip install 'kvcustody[{extra}]'`." for extra, names in extras.items()]
        self.epilog = "\n\n".join([first, *(["Not installed: " + " ".join(more)] if more else [])])
        super().format_help(ctx, formatter)


app = typer.Typer(
    cls=Kvcustody,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Custody of LLM key/value caches: who may reuse a block, for how long it may exist, "
    "and proof that it is gone.",
    epilog=_FIRST["up"],
)


def _print_version(asked: bool) -> None:
    if asked:
        say(f"kvcustody {__version__}")
        raise typer.Exit


@app.callback()
def _kvcustody(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Send log lines to stderr: stdout is for a command's answer."""
    configure_logging(_log_to_stderr)


def _log_to_stderr() -> None:
    import structlog

    structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))


if __name__ == "__main__":
    app()
