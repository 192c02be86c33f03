"""`kvcustody policy enforcement` and `enforce`: for whom workers enforce their policy, and what they foresee of others.

On the ledger itself, or against a control plane with `--server`. docs/operate/adoption.md walks a whole adoption.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from kvcustody.audit.evidence.processes import enforcement as recorded
from kvcustody.audit.evidence.query.known_names import known_tenant
from kvcustody.audit.write.record_operator_act import record_operator_act
from kvcustody.clock import SystemClock
from kvcustody.console.api.asking import asked
from kvcustody.console.command import Json, make_table, print_answer, print_json, say, stdout
from kvcustody.console.opening import control_plane, writing
from kvcustody.console.options import Source, moment_us
from kvcustody.errors import ConfigError, LedgerError
from kvcustody.governance.api.models.policies import EnforcementModel
from kvcustody.governance.monitoring.enforcement import ENFORCE, MILLIONTHS, MODES, MONITOR
from kvcustody.governance.monitoring.ordering import enforcement_order
from kvcustody.governance.service.answers.enforcement import GET_ENFORCEMENT
from kvcustody.governance.service.operations.parameter_groups import grouped
from kvcustody.times import readable

_PLACE = "/v1/policies/enforcement"


def add_to(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command(name="enforcement", epilog=_SHOW)(show_command)
    app.command(name="enforce", epilog=_ORDER)(order_command)


_SHOW = "Example:\n\n    kvcustody policy enforcement --ledger sqlite:///kvcustody.db"


@grouped
def show_command(
    source: Source,
    *,
    as_json: Json = False,
) -> None:
    """Show for whom workers enforce their policy, and what enforcing would have denied and cost where they monitor.

    Refused tokens were reused and would not have been; what is prefilled again is what enforcing would have cost.
    """
    found = asked(GET_ENFORCEMENT, source)
    if as_json:
        print_answer(EnforcementModel, found)
        return
    order_ = found["order"]
    if order_ is None:
        say("ordered: nothing; every worker enforces its policy for everybody")
    else:
        say(f"ordered by {order_['actor']}: {_said(order_)}, because: {order_['reason']}")
    out = stdout()
    table = make_table("workers", "worker", "mode", "since", "not followed because", left=4)
    for one in found["workers"]:
        table.add_row(one["worker"], _said(one), readable(one["since_us"]), one["refused"])
    out.print(table)
    if found["forecasts"]:
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
        for one in found["forecasts"]:
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
    "Examples:\n\n    kvcustody policy enforce monitor --until 2026-12-24 --actor olga --reason 'first week'\n\n"
    "    kvcustody policy enforce canary --tenant acme --share 5% --until 2026-12-24 --actor olga --reason canary\n\n"
    "    kvcustody policy enforce enforce --actor olga --reason 'canary was clean'"
)


@grouped
def order_command(
    mode: Annotated[str, typer.Argument(help="monitor, canary or enforce.", metavar="MODE")],
    reason: Annotated[str, typer.Option(help="Why, for the record.")],
    actor: Annotated[
        str, typer.Option(help="Who orders it, for the record; with --server it is the key's.")
    ] = "",
    tenant: Annotated[
        list[str] | None,
        typer.Option("--tenant", help="Of a canary: all requests of this tenant; repeatable."),
    ] = None,
    share: Annotated[
        str, typer.Option("--share", help="Of a canary: a share of the sessions of all others, as 5%.")
    ] = "",
    until: Annotated[
        str | None, typer.Option("--until", help="When everybody is enforced for again (ISO 8601, UTC).")
    ] = None,
    *,
    source: Source,
    as_json: Json = False,
) -> None:
    """Order for whom workers enforce their policy; of all others they only record what it would have decided.

    Workers follow without a restart, where their setting `monitoring` allows it; what is cached under the engine's own
    keys of whoever is enforced for from now on ends at once.
    """
    if mode not in MODES:
        raise ConfigError(f"`{mode}` is none of {', '.join(MODES)}")
    until_us = moment_us(until, "--until") if until is not None else None
    if source.plane.server is not None:
        body = {"mode": mode, "tenants": tenant or [], "share": share, "until_us": until_us, "reason": reason}
        with control_plane(source) as connection:
            made = connection.post(f"{_PLACE}:order", body)
    else:
        made = _order_in(source.ledger, mode, tenant or [], share, until_us, actor, reason)
    if as_json:
        print_json(made)
    else:
        say(f"ordered: {_said(made)}")


def _order_in(
    ledger: str, mode: str, tenants: list[str], share: str, until_us: int | None, actor: str, reason: str
) -> dict[str, Any]:
    clock = SystemClock()
    with writing(ledger) as engine:
        with engine.connect() as connection:
            previous = recorded.newest_order(connection)
            named = [known_tenant(connection, one) or one for one in tenants]
        record_operator_act(
            engine,
            lambda at_us: enforcement_order(
                previous,
                mode,
                at_us=at_us,
                now_utc_us=clock.utc_us(),
                tenants=named,
                share=share,
                until_us=until_us,
                actor=actor,
                reason=reason,
            ),
            clock=clock,
        )
        with engine.connect() as connection:
            made = recorded.newest_order(connection)
    if made is None:
        raise LedgerError("the order is not on record")
    return made._asdict()


def _said(one: Mapping[str, Any]) -> str:
    """For whom is enforced, in words."""
    if one["mode"] == ENFORCE:
        return "enforced for everybody"
    until = f" until {readable(one['until_us'])}"
    if one["mode"] == MONITOR:
        return f"monitored only{until}"
    share = one["share_millionths"] * 100 / MILLIONTHS
    parts = [*one["tenants"], *([f"{share:g}% of the sessions of others"] if share else [])]
    return f"enforced for {', '.join(parts)}, the others monitored{until}"
