"""`kvcustody policy enforcement` and `enforce`: the tenants for which workers enforce, and forecasts for the others.

On the ledger itself, or against a control plane with `--server`. docs/how-to/operate/adopt.md walks a whole adoption.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from kvcustody.console.api.client import done
from kvcustody.console.command import Json, make_table, print_json, say, stdout
from kvcustody.console.options import ActSource, moment_us
from kvcustody.errors import ConfigError
from kvcustody.governance.monitoring.enforcement import ENFORCE, MILLIONTHS, MODES, MONITOR
from kvcustody.governance.service.operations.parameter_groups import grouped
from kvcustody.times import readable


def add_to(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command(name="enforce", epilog=_ORDER)(order_command)


def print_enforcement(enforcement: dict[str, Any]) -> None:
    """Print for which tenants workers enforce their policy, and what enforcement would have denied and cost the others.

    Refused tokens were reused and would not have been; what is prefilled again is what enforcing would have cost.
    """
    order_ = enforcement["order"]
    if order_ is None:
        say("no order: every worker enforces its policy for every tenant")
    else:
        say(f"ordered by {order_['actor']}: {_said(order_)}, because: {order_['reason']}")
    out = stdout()
    table = make_table("workers", "worker", "mode", "since", "not followed because", left=4)
    for one in enforcement["workers"]:
        table.add_row(one["worker"], _said(one), readable(one["since_us"]), one["refused"])
    out.print(table)
    if enforcement["forecasts"]:
        columns = (
            "tenant",
            "requests",
            "would deny",
            "reused",
            "would refuse",
            "enforced, found",
            "prefilled again",
        )
        table = make_table("monitored, in requests and tokens", *columns, left=1)
        for one in enforcement["forecasts"]:
            table.add_row(
                one["tenant"],
                *(
                    f"{one[name]:,}"
                    for name in (
                        "requests",
                        "would_deny",
                        "reused_tokens",
                        "refused_tokens",
                        "forecast_tokens",
                        "prefilled_again_tokens",
                    )
                ),
            )
        out.print(table)


_ORDER = (
    "Examples:\n\n    kvcustody policy enforce monitor --until 2026-12-24 --reason 'first week'\n\n"
    "    kvcustody policy enforce canary --tenant acme --share 5% --until 2026-12-24 --reason canary\n\n"
    "    kvcustody policy enforce enforce --reason 'canary was clean'"
)


@grouped
def order_command(
    mode: Annotated[str, typer.Argument(help="monitor, canary or enforce.", metavar="MODE")],
    reason: Annotated[str, typer.Option(help="Reason, for the record.")],
    tenant: Annotated[
        list[str] | None,
        typer.Option("--tenant", help="Of a canary: all requests of this tenant; repeatable."),
    ] = None,
    share: Annotated[
        str, typer.Option("--share", help="Of a canary: a share of the sessions of all others, as 5%.")
    ] = "",
    until: Annotated[
        str | None, typer.Option("--until", help="When the policy is enforced for everyone again (ISO 8601, UTC).")
    ] = None,
    *,
    source: ActSource,
    as_json: Json = False,
) -> None:
    """Order for whom workers enforce their policy; of all others they only record what it would have decided.

    Workers follow without a restart, where their setting `monitoring` allows it; what is cached under the engine's own
    keys of whoever is enforced for from now on ends at once.
    """
    if mode not in MODES:
        raise ConfigError(f"`{mode}` is none of {', '.join(MODES)}")
    order = done(
        "orderEnforcement",
        source,
        mode=mode,
        tenants=tenant or [],
        share=share,
        until_us=moment_us(until, "--until"),
        reason=reason,
    )
    if as_json:
        print_json(order)
    else:
        say(f"ordered: {_said(order)}")


def _said(order: Mapping[str, Any]) -> str:
    """Return in words for which tenants the policy is enforced."""
    if order["mode"] == ENFORCE:
        return "enforced for everybody"
    until = f" until {readable(order['until_us'])}"
    if order["mode"] == MONITOR:
        return f"monitored only{until}"
    share = order["share_millionths"] * 100 / MILLIONTHS
    parts = [*order["tenants"], *([f"{share:g}% of the sessions of others"] if share else [])]
    return f"enforced for {', '.join(parts)}, the others monitored{until}"
