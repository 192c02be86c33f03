"""How commands print an answer for people; answers of other operations are printed as names and values.

The parameters of such a command are the operation's. With `--json` it prints the answer itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple


class Presenter(NamedTuple):
    """The function that prints an answer, as `module:function` in the console, with examples of the command.

    `parameters`: the parameters of the call that the function takes too, by their names in the API document.
    `content`: the text of the answer that `--out` writes to a file, instead of the answer.
    """

    function: str
    examples: tuple[str, ...]  # without `kvcustody`
    parameters: tuple[str, ...] = ()
    content: str = ""

    def show(self, answer: dict[str, Any], values: Mapping[str, Any]) -> None:
        """Print the answer to a call with these parameter values."""
        module, _, name = self.function.partition(":")
        more = {parameter: values[parameter] for parameter in self.parameters}
        getattr(import_module(f"kvcustody.console.{module}"), name)(answer, **more)


PRESENTERS = {
    "getRoutes": Presenter("routes.print_routes:print_routes", ("routes summary --since 2026-11-01 --json",)),
    "listRouteReceipts": Presenter(
        "routes.print_routes:print_receipts", ("routes list --tenant acme", "routes list --request r1 --json")
    ),
    "listRouteFindings": Presenter(
        "routes.print_routes:print_findings", ("routes findings --since 2026-11-01 --json",)
    ),
    "listTiers": Presenter("tier.print_tiers:print_tiers", ("tier list --since 2026-11-01 --tenant acme",)),
    "listTransfers": Presenter(
        "tier.print_tiers:print_transfers",
        ("tier transfers --tier nvme --outcome failed --since 2026-11-01 --json",),
    ),
    "explainTransfers": Presenter(
        "tier.print_tiers:print_request", ("tier explain 17 --worker gpu-0",), ("residency",)
    ),
    "listPrincipals": Presenter("principal.print_principals:print_principals", ("principal list --all --json",)),
    "listKeys": Presenter("principal.print_principals:print_keys", ("apikey list alice --json",)),
    "listCases": Presenter("case.print_cases:print_cases", ("case list --tenant acme --json",)),
    "getCase": Presenter("case.print_cases:print_case", ("case show 4f1c… --json",)),
    "listErasures": Presenter("erasure.print_erasures:print_erasures", ("erasure list --tenant acme --json",)),
    "listEvents": Presenter(
        "audit.query:print_events", ("audit query --tenant acme --outcome deny --since 2026-11-20 --json",)
    ),
    "listFindings": Presenter("scan.print_findings:print_findings", ("scan findings --tenant acme --json",)),
    "listFrameworks": Presenter("report.print_made:print_frameworks", ("report frameworks --json",)),
    "listReports": Presenter(
        "report.print_made:print_reports",
        (
            "report list",
            "report list --tenant acme --json",
            "report list --server https://kvcustody.example:8443 --api-key-file me.key",
        ),
    ),
    "listReportSchedules": Presenter("report.print_made:print_schedules", ("report schedules list --json",)),
    "getRevision": Presenter(
        "policy.release:print_revision",
        ("policy revision 3", "policy revision 3 --out policy.yaml"),
        content="document",
    ),
    "getEnforcement": Presenter("policy.enforcement:print_enforcement", ("policy enforcement --json",)),
    "listPrefixes": Presenter(
        "audit.print_prefixes:print_prefixes", ("prefixes top --since 2026-11-01 --tenant acme --json",)
    ),
}
