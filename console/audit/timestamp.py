"""`kvcustody audit timestamp`: an RFC 3161 authority states when the newest checkpoint existed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcustody.audit.tlog.rfc3161_timestamp import TimestampAuthority, stamp
from kvcustody.console.command import Json, print_json
from kvcustody.console.options_ledger import DEFAULT, Ledger, shown, writing


def timestamp(
    url: Annotated[str, typer.Option(help="Where the authority answers timestamp queries.")],
    certificate: Annotated[Path, typer.Option(help="The authority's own certificate (PEM).")],
    roots: Annotated[Path, typer.Option(help="The roots that it must lead to (PEM).")],
    name: Annotated[str, typer.Option(help="The authority's name in the ledger.")] = "tsa",
    ledger: Ledger = DEFAULT,
    *,
    as_json: Json = False,
) -> None:
    """Have the newest signed checkpoint stamped, check the token, and keep it beside the ledger.

    It shows that the checkpoint existed by then. It is no witness: it does not look for forks.
    """
    authority = TimestampAuthority.load(name, url, certificate, roots)
    with writing(ledger) as engine:
        size, at_us = stamp(engine, authority)
    if as_json:
        print_json({"checkpoint": size, "authority": name, "at_us": at_us})
    else:
        print(f"checkpoint {size} existed at {shown(at_us)} UTC, says {name}")
