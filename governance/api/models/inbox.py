"""What waits for the caller, as the API shows it."""

from __future__ import annotations

from typing import Literal

from kvcustody.governance.api.models.base import Model, example

_ITEM = {
    "id": "approval:revision-8", "kind": "approval", "about": "revision-8", "state": "waiting",
    "text": "revision 8 of alice waits for an approval", "since_us": 1_780_000_000_000_000, "due_us": None,
    "tenant": None, "principal": None, "page": "/policy/8", "command": "kvcustody policy review 8",
}  # fmt: skip


class InboxItemModel(Model):
    """One thing that waits: `soon` ends within days, `overdue` is past its date, `waiting` has none."""

    model_config = example(_ITEM)

    id: str
    kind: Literal[
        "approval", "activation", "consent", "erasure", "grant", "policy", "key", "certificate", "witness"
    ]
    about: str
    state: Literal["waiting", "soon", "overdue"]
    text: str
    since_us: int | None
    due_us: int | None
    tenant: str | None
    principal: str | None
    page: str
    command: str


class InboxPage(Model):
    """A page of them, the most urgent first."""

    model_config = example({"items": [_ITEM], "next": None})

    items: list[InboxItemModel]
    next: str | None
