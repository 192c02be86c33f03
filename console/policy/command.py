"""`kvcustody policy`: the command group. Each module of this folder adds its commands to `app`.

1. Exit codes: 0 the answer is yes, 1 the answer is no (problems, findings, a closed gate), 2 it could not be given.
2. Commands parse options and render; every answer is a call of `policies.workbench` that returns typed data.
"""

from __future__ import annotations

import typer

from kvcustody.console.api.group import OperationGroup
from kvcustody.console.policy import enforcement, export, lint, orders, release, review, segment, simulate
from kvcustody.console.policy import explain_and_test as ask
from kvcustody.console.policy import init_fmt_schema as write
from kvcustody.console.policy import validate as author

EPILOG = (
    "Start with `kvcustody policy init`; docs/reference/policy-language.md describes the language, "
    "docs/reference/policy-codes.md every code."
)

app = typer.Typer(
    cls=OperationGroup,
    no_args_is_help=True,
    help="Write, check, review, prove and release the policy: who may reuse whose cached blocks, and for how long.",
    epilog=EPILOG,
)
for _module in (write, author, segment, lint, ask, review, simulate, export, release, enforcement, orders):
    _module.add_to(app)
