"""The `kvcustody` command: its name for each room, and what the room does in one sentence."""

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
        "What a fleet would find in its caches, in fast time.",
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
        "The ledger's database: its schema, its roles, its months, and moving it from SQLite to PostgreSQL.",
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
        "Enrol, list, disable and enable the people and machines that may ask a control plane.",
    ),
    "apikey": Lazy(
        "kvcustody.console.principal.keys:keys",
        "Issue, replace, list and revoke API keys: of principals, and of an engine's tenants.",
    ),
    "audit": Lazy(
        "kvcustody.console.audit.command:app",
        "Look into the ledger, prove what it says, export it and check it.",
    ),
    "witness": Lazy(
        "kvcustody.console.witness.command:app",
        "Run a witness (C2SP tlog-witness): somebody else who signs that a ledger only grew.",
    ),
    "custody": Lazy(
        _OPERATIONS,
        "What is held and was held: blocks, residencies, totals, refusals, and what crossed between tenants.",
        below="",
    ),
    "coverage": Lazy(
        "kvcustody.console.coverage.command:app",
        "Deletion coverage: of all custody due to end, how much has evidence of its end, in time.",
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
        "End everything that is held of a tenant, subject, session, domain or model, and prove it.",
    ),
    "case": Lazy(
        "kvcustody.console.case.command:app",
        "Requests of people about their data as cases: receipt, identity, the clock of one month, decision, letter.",
    ),
    "inbox": Lazy(
        "kvcustody.console.inbox:inbox",
        "What waits for somebody: approvals, consents, missed erasures, and what is about to end.",
        "EPILOG",
    ),
    "scan": Lazy("kvcustody.console.scan.command:app", "Orphans: custody that two sources disagree about."),
    "worker": Lazy(
        "kvcustody.console.worker:app",
        "Workers' processes in a ledger: which have not ended, and closing one that does not come back.",
    ),
    "job": Lazy(
        _OPERATIONS,
        "Long work of a control plane, as checks, exports and reports are: list, follow, cancel, fetch its files.",
        below="",
    ),
    "tier": Lazy(
        _OPERATIONS,
        "Tiers: what was stored off the device and came back, what was left alone, and why.",
        below="docs/how-to/storage/set-up-tiers.md#why-was-it-moved-or-not explains decisions and figures.",
    ),
    "routes": Lazy(
        _OPERATIONS,
        "Routes: where requests went that came through a door, what they found there, and receipts that lack a half.",
        below="docs/concepts/route-receipts.md says what each figure means.",
    ),
    "showback": Lazy(
        "kvcustody.console.audit.showback:bill",
        "Block-seconds held, prefill seconds saved, taken from others and given to them, by tenant.",
        "EPILOG",
    ),
    "prefixes": Lazy(
        _OPERATIONS,
        "Which prefixes are worth keeping: what later requests reused of what one had written.",
        below="docs/how-to/audit/bill-tenants.md#prefixes says what a row is; no content is read or shown.",
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
        "What a control plane says of itself: health, readiness, metrics, versions, its API document.",
        below="",
    ),
    "protocol": Lazy(
        _OPERATIONS,
        "What workers and their control plane say to each other, for whoever writes or checks a worker.",
        below="",
    ),
    "doctor": Lazy(
        "kvcustody.console.doctor.command:doctor",
        "Look for what would stop or weaken kvcustody on this machine, and say what to do about it.",
        "EPILOG",
    ),
    "clock": Lazy(
        "kvcustody.console.clock:app",
        "The time by which deadlines are compared: where it is, and confirming this machine's clock.",
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
    """Every command of this package; its help ends with where to start, by what runs here."""

    table = COMMANDS
    elsewhere = dict.fromkeys(("conformance", "known-bugs"), "kvcustody[testkit]")
    needs = NEEDS

    def class_of_group(self, name: str) -> type[typer.core.TyperGroup] | None:
        """Groups of doors and others have commands for the operations of their name."""
        from kvcustody.console.api.group import OperationGroup
        from kvcustody.console.api.operation_commands import commands_of

        return OperationGroup if commands_of(name) else None

    def main(self, *given: Any, **named: Any) -> Any:
        """Run the program. What it imports is no garbage, so garbage is looked for after many more new objects."""
        before = gc.get_threshold()
        gc.set_threshold(_NEW_OBJECTS, *before[1:])
        try:
            return super().main(*given, **named)
        finally:
            gc.set_threshold(*before)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The help, and what else there is where an extra is lacking."""
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
    """What is logged on the way of a command goes to stderr: stdout is its answer."""
    configure_logging(_log_to_stderr)


def _log_to_stderr() -> None:
    import structlog

    structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))


if __name__ == "__main__":
    app()
