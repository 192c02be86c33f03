"""`kvcustody inbox`: what waits for somebody, of a ledger or of whoever asks a control plane."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from kvcustody.audit.evidence.processes.running_policies import read_running_policies
from kvcustody.console.clock import deadline_us
from kvcustody.console.command import Json, make_table, print_answer, say, stdout
from kvcustody.console.opening import control_plane, reading, service_settings
from kvcustody.console.options import Config, Source
from kvcustody.governance.api.models.health import InboxPage
from kvcustody.governance.service.operations.parameter_groups import grouped
from kvcustody.times import readable

EPILOG = (
    "Examples:\n\n    kvcustody inbox\n\n    kvcustody inbox --ledger sqlite:///kvcustody.db --json\n\n"
    "    kvcustody inbox --server https://kvcustody.example:8443 --api-key-file me.key\n\n"
    "docs/operate/inbox.md says what comes here, and how it is delivered by webhook and mail."
)
_MARKS = {"overdue": "bold red", "soon": "yellow"}


@grouped
def inbox(
    *,
    config: Config = None,
    source: Source,
    as_json: Json = False,
) -> None:
    """What waits for somebody: approvals, consents, missed erasures, and what is about to end.

    Grants, keys, certificates and the policy itself end. With --server: what you can do something about. Of a ledger
    itself: everything; proposals where the settings (--config) name the trust configuration that they are checked by.
    """
    if source.plane.server is not None:
        with control_plane(source) as plane:
            items = plane.items("/v1/inbox")
    else:
        items = _local(source.ledger, config)
    if as_json:
        print_answer(InboxPage, {"items": items})
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


def _local(ledger: str, config: Any) -> list[dict[str, Any]]:
    from kvcustody.governance.release.policies_in_effect import policies_in_effect
    from kvcustody.governance.release.replay_records import fold
    from kvcustody.governance.release.store import SqlStore
    from kvcustody.governance.release.trust import read_trust
    from kvcustody.governance.service.fleet.webhooks import stored_troubles
    from kvcustody.governance.service.inbox.read_inbox import InboxReader

    settings = service_settings(config, ledger)
    trust = settings.policy_trust
    with reading(ledger) as engine:
        release = None if trust is None else fold(SqlStore(engine).read(), read_trust(trust))
        with engine.connect() as connection:
            effect = policies_in_effect(read_running_policies(connection), release)
            now_us = deadline_us()
            reader = InboxReader(settings.certificates, troubles=lambda: stored_troubles(settings, now_us))
            found = reader.read(connection, now_us, release=release, effect=effect)
    return [dict(item.data()) for item in found.items]
