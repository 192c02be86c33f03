"""`kvcustody inbox`: the open tasks in a ledger, or a caller's own at a control plane."""

from __future__ import annotations

import orjson
from rich.text import Text

from kvcustody.console.api.client import asking, call, every_page
from kvcustody.console.command import Json, make_table, print_json, say, stdout
from kvcustody.console.options import ServiceSource
from kvcustody.governance.service.operations.parameter_groups import grouped
from kvcustody.times import readable

EPILOG = (
    "Examples:\n\n    kvcustody inbox\n\n    kvcustody inbox --ledger sqlite:///kvcustody.db --json\n\n"
    "    kvcustody inbox --server https://kvcustody.example:8443 --api-key-file me.key\n\n"
    "docs/how-to/operate/inbox.md says what comes here, and how it is delivered by webhook and mail."
)
_MARKS = {"overdue": "bold red", "soon": "yellow"}


@grouped
def inbox(
    *,
    source: ServiceSource,
    as_json: Json = False,
) -> None:
    """Open tasks: approvals, consents, missed erasures, and what is about to end.

    Grants, keys, certificates and the policy itself end. With --server: what you can do something about. Of a ledger
    itself: everything; proposals where the settings (--config) name the trust configuration that they are checked by.
    """
    with asking(source, "listInbox") as asker:
        answer = every_page(asker, "listInbox", {}, call(asker, "listInbox", {}))
    items = orjson.loads(answer.body)["items"]
    if as_json:
        print_json(orjson.loads(answer.body))
        return
    if not items:
        say("nothing waits")
        return
    table = make_table(f"{len(items)} wait", "state", "what", "due (UTC)", "what to do", left=4)
    for item in items:
        due = "" if item["due_us"] is None else readable(item["due_us"])
        state = item["state"]
        table.add_row(Text(state, _MARKS.get(state, "")), item["text"], due, item["command"])
    stdout().print(table)
