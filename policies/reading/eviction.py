"""Reading `eviction`: which CACHED block leaves first under pressure. It never extends a deadline.

1. A parameter is accepted only by the policy that it belongs to.
"""

from __future__ import annotations

from kvcustody.policies.document.model import Eviction, EvictionKind, TokenRange
from kvcustody.policies.document.problems import quote
from kvcustody.policies.document.yaml_nodes import Node
from kvcustody.policies.reading.fields import FieldReader

_KINDS = {kind.value: kind for kind in EvictionKind}
_PARAMETERS = {EvictionKind.PRIORITY: ("priority", "ranges"), EvictionKind.SLRU: ("protected", "hits")}
_PRIORITY_MAX = 100
_TOKENS_MAX = 10_000_000
PRIORITY_DEFAULT = 35
HITS_DEFAULT = 2


def read_eviction(fields: FieldReader, node: Node) -> Eviction:
    """The eviction policy with the parameters of its kind."""
    names = tuple(name for parameters in _PARAMETERS.values() for name in parameters)
    found = fields.mapping(node, "`eviction`", ("policy",), names)
    if "policy" not in found:
        return Eviction(EvictionKind.LRU, mark=node.mark)
    kind = fields.choice(found["policy"], "`policy`", _KINDS)
    for name in names:
        if name in found and name not in _PARAMETERS.get(kind, ()):
            fields.problems.add(
                found[name].mark, "KVP306", f"`{name}` does not apply to eviction {quote(kind.value)}"
            )
    if kind is EvictionKind.SLRU:
        protected = fields.percentage(found["protected"], "`protected`") if "protected" in found else None
        hits = fields.integer(found["hits"], "`hits`", 1, 1_000) if "hits" in found else HITS_DEFAULT
        return Eviction(kind, protected=protected, hits=hits, mark=node.mark)
    if kind is EvictionKind.PRIORITY:
        priority = _priority(fields, found["priority"]) if "priority" in found else PRIORITY_DEFAULT
        items = fields.items(found["ranges"], "`ranges`", 64) if "ranges" in found else ()
        return Eviction(
            kind, priority=priority, ranges=tuple(_range(fields, item) for item in items), mark=node.mark
        )
    return Eviction(kind, mark=node.mark)


def _range(fields: FieldReader, node: Node) -> TokenRange:
    found = fields.mapping(node, "token range", ("from", "priority"), ("to", "for"))
    start = fields.integer(found["from"], "`from`", 0, _TOKENS_MAX) if "from" in found else 0
    end = fields.integer(found["to"], "`to`", start + 1, _TOKENS_MAX + 1) if "to" in found else None
    priority = _priority(fields, found["priority"]) if "priority" in found else PRIORITY_DEFAULT
    for_us = fields.duration_us(found["for"], "`for`", positive=True) if "for" in found else None
    return TokenRange(start, end, priority, for_us, node.mark)


def _priority(fields: FieldReader, node: Node) -> int:
    return fields.integer(node, "`priority`", 0, _PRIORITY_MAX)
