"""Each kind of eviction as a policy has it, and what a scan leaves of a prefix that was hot before it."""

from __future__ import annotations

KINDS = {
    "lru": "{policy: lru}",
    "fifo": "{policy: fifo}",
    "lfu": "{policy: lfu}",
    "slru": "{policy: slru, hits: 2}",
    "slru-share": "{policy: slru, hits: 2, protected: 50%}",
    "priority": "{policy: priority, priority: 20, ranges: [{from: 0, to: 128, priority: 90}]}",
    "cost": "{policy: cost}",
    "value": "{policy: value, signals: [next-turn, scope, freshness, reuse, position]}",
}
LOSES_HOT = ("lru", "fifo")
