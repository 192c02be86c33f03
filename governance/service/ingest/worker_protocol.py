"""The version of the protocol between workers and a control plane, which each side states.

Version 2: the control plane writes the leaves that assign issuers and request erasures, and refuses them from workers.
1. A worker states its version in a header of every request, the control plane its own when a worker registers.
2. An older worker is served. If it hands in a kind that now belongs to the control plane, the answer is
   `worker-protocol`. The worker then keeps the batch in its spill, and no leaf of it is lost, as a refused one would
   be.
3. A worker does not start at an older control plane: upgrade the control plane first.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcustody.audit.leaf.leaf_schema import LEAF_KEYS, WORKERS_KINDS
from kvcustody.governance.service.problem_details import ProblemError

PROTOCOL = 2
HEADER = "Kvcustody-Worker-Protocol"
_FIRST = 1  # of workers that state none


def stated_protocol(headers: Mapping[str, str]) -> int:
    """Return the version that a request states; `headers` by lower-case name."""
    said = headers.get(HEADER.lower(), "")
    return int(said) if said.isascii() and said.isdigit() and len(said) <= 4 else _FIRST


def answer_older(refused: ProblemError, headers: Mapping[str, str]) -> ProblemError:
    """Return a refused batch's answer in a form that an older worker knows (rule 2)."""
    protocol, kind = stated_protocol(headers), refused.extra.get("kind")
    if protocol >= PROTOCOL or kind in WORKERS_KINDS or kind not in LEAF_KEYS:
        return refused
    return ProblemError(
        "worker-protocol",
        f"leaf {refused.extra['leaf']} is of the kind `{kind}`, which the control plane writes from protocol "
        f"{PROTOCOL} on; this worker speaks {protocol}: upgrade it",
        protocol=PROTOCOL,
        kind=kind,
    )
