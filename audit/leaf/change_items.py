"""The items of a `custody-changed` leaf as bodies of leaves of their own kinds, for readers of single leaves.

1. Items are numbered from 1 on over all lists of a leaf, in the order of `FOLDED`; 0 is a leaf that is no list.
2. An item's body has the keys of its own kind's leaf and `item`; it is whole, whatever part its leaf is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from kvcustody.audit.kinds.block_runs import encoded_blocks
from kvcustody.audit.leaf.leaf_schema import ITEMS, ItemSchema

CHANGED = "custody-changed"
_HEAD = ("incarnation", "log", "outage", "schema", "tenant")
_RUNS = {key: item.keys.index("runs") for key, item in ITEMS.items()}


def plain_bodies(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the bodies for which a leaf's body stands: itself, or each of its items (rule 2)."""
    if body["kind"] != CHANGED:
        yield body
        return
    moment, offset_us = int(body["boot_us"]), int(body["at_us"]) - int(body["boot_us"])
    head = {name: body[name] for name in _HEAD}
    head |= {"sequence": body["sequence"], "part": 1, "parts": 1, "of_incarnation": body["incarnation"]}
    number = 0
    for key, schema in ITEMS.items():
        for item in body.get(key, ()):
            number += 1
            made = head | {"kind": schema.name, "item": number} | _values(schema, item, moment)
            made["at_us"] = made["boot_us"] + offset_us
            made["blocks"] = sum(map(encoded_blocks, made["runs"]))
            yield made


def item_of(body: Mapping[str, Any], number: int, kinds: Collection[str]) -> Mapping[str, Any] | None:
    """Return the body of one item of these kinds; the leaf's own if `number` is 0; None if there is no such item."""
    if not number:
        return body
    items = (made for made in plain_bodies(body) if made.get("item") == number and made["kind"] in kinds)
    return next(items, None)


def runs_of_items(body: Mapping[str, Any], kinds: Collection[str]) -> dict[int, Any]:
    """Return the encoded runs of a leaf's items of these kinds, by their numbers."""
    every = ((schema.name, item[_RUNS[key]]) for key, schema in ITEMS.items() for item in body.get(key, ()))
    return {number: runs for number, (kind, runs) in enumerate(every, 1) if kind in kinds}


def _values(schema: ItemSchema, item: Sequence[Any], moment: int) -> dict[str, Any]:
    made = schema.absent | dict(zip(schema.keys, item, strict=False))  # an earlier version's item is shorter
    for key in ("boot_us", *(schema.moments - {"boot_us"})):
        made[key] = 0 if made[key] is None else (moment if key == "boot_us" else made["boot_us"]) - int(made[key])
    return made
