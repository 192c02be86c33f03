"""`kvcustody subject`: what is held about one person, why, and until when; erasure; certificate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcustody.audit.reports.subject_access import SubjectPage, page_of_data
from kvcustody.console.api.client import done
from kvcustody.console.api.group import OperationGroup
from kvcustody.console.command import Json, make_table, print_json, stdout
from kvcustody.console.files import write_files
from kvcustody.console.options import ServiceSource, moment_us
from kvcustody.console.render.document_forms import render
from kvcustody.console.render.number_format import count, moment, percent
from kvcustody.governance.service.operations.parameter_groups import grouped
from kvcustody.plurals import several

app = typer.Typer(
    cls=OperationGroup,
    no_args_is_help=True,
    help="One subject's page for a data-protection officer: what is held, why, until when, and what was erased.",
)


@app.callback()
def _group() -> None:
    """Keep `show` a command of its own in the group."""


@app.command(
    epilog="Examples:\n\n    kvcustody subject show --tenant acme --subject ada\n\n"
    "    kvcustody subject show --tenant acme --subject ada --html ada.html --json\n\n"
    "    kvcustody subject show --tenant acme --subject ada --server https://ledger.example:8443 --api-key-file dpo.key"
)
@grouped
def show(
    *,
    tenant: Annotated[str, typer.Option(help="The subject's tenant.")],
    subject: Annotated[str, typer.Option(help="The subject, as the tenant's identity names it.")],
    at: Annotated[str | None, typer.Option(help="As of this UTC time instead of now (ISO 8601).")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the page for people here.")] = None,
    source: ServiceSource,
    as_json: Json = False,
) -> None:
    """Show what the ledger has of one subject. The answer names pseudonyms only, so it may be kept."""
    page = page_of_data(done("getSubject", source, tenant=tenant, subject=subject, at=moment_us(at)))
    if html is not None:
        write_files(html.parent, {html.name: render(page, "html")})
    if as_json:
        print_json(page.data())
    else:
        _print(page)


def _print(page: SubjectPage) -> None:
    console = stdout()
    if not page.holdings:
        console.print("nothing is on record for this subject")
    else:
        table = make_table("what is held", "state", "class", "why", "since", "until", "blocks", "in custody", left=5)
        for item in page.holdings:
            why = f"{', '.join(item.reasons)} (revision {item.revision})"
            times = (moment(item.opened_us)[:19], moment(item.until_us)[:19])
            table.add_row(item.state, item.classification, why, *times, count(item.blocks), count(item.in_custody))
        console.print(table)
    evidence = page.evidence
    console.print(
        f"{several(page.held_blocks, 'block')} in custody; of {several(evidence.due, 'unit')} due "
        f"{percent(evidence.covered, evidence.due)} are covered"
    )
    for each in page.erasures:
        console.print(f"erasure {each.erasure} ({each.selector}), {moment(each.at_us)[:19]}: {each.standing.text}")
