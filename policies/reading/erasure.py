"""Reading `erasure`: by when an erasure must be done, and what becomes of requests that run when it arrives.

1. Whatever it says, nothing that an erasure covers is attached from the moment it takes effect.
"""

from __future__ import annotations

from kvcustody.policies.document.model import ErasureDuty, OnRunning
from kvcustody.policies.document.yaml_nodes import Node
from kvcustody.policies.reading.fields import FieldReader

_RUNNING = {running.value: running for running in OnRunning}


def read_erasure(fields: FieldReader, node: Node) -> ErasureDuty:
    """The deadline and what happens to running requests; each has its default."""
    found = fields.mapping(node, "`erasure`", (), ("within", "running"))
    duty = ErasureDuty()
    within_us = (
        fields.duration_us(found["within"], "`within`", positive=True)
        if "within" in found
        else duty.within_us
    )
    running = fields.choice(found["running"], "`running`", _RUNNING) if "running" in found else duty.running
    return ErasureDuty(within_us, running, node.mark)
