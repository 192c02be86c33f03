"""The plain values of a YAML file that is no policy: settings, salts, credentials, all read by one strict reader.

What YAML 1.1 and 1.2 read differently (`off`, `010`, `1:30`) and a repeated key are refused here as in a policy.
"""

from __future__ import annotations

from typing import Any

from kvcustody.policies.document.problems import Problems
from kvcustody.policies.document.yaml_nodes import (
    BYTES_MAX,
    NODES_MAX,
    Broken,
    MappingNode,
    Node,
    Scalar,
    SequenceNode,
    parse,
)

DIGITS_MAX = 18  # Python refuses to read a few thousand, and no field takes as many as these


def read_values(content: bytes, name: str, *, bytes_max: int = BYTES_MAX, nodes_max: int = NODES_MAX) -> Any:
    """The document as dictionaries, lists, texts and numbers; raises `PolicyRejected` with every problem."""
    problems = Problems(name)
    root = parse(content, problems, floats=True, bytes_max=bytes_max, nodes_max=nodes_max)
    value = None if root is None else _plain(root, problems)
    problems.raise_if_any()
    return value


def scalar_value(scalar: Scalar) -> str | int | float | bool | None:
    """What a scalar means; raises `ValueError` for a number that is too long."""
    if scalar.kind == "integer":
        digits = len(scalar.text.lstrip("+-"))
        if digits > DIGITS_MAX:
            raise ValueError(f"a number of {digits} digits, over {DIGITS_MAX}")
        return int(scalar.text)
    if scalar.kind == "float":
        return float(scalar.text)
    if scalar.kind == "boolean":
        return scalar.text.lower() == "true"
    return None if scalar.kind == "null" else scalar.text


def _plain(node: Node, problems: Problems) -> Any:
    if isinstance(node, MappingNode):
        return {name: _plain(value, problems) for name, value in node.items()}
    if isinstance(node, SequenceNode):
        return [_plain(item, problems) for item in node]
    if isinstance(node, Broken):  # its problem is on record
        return None
    try:
        return scalar_value(node)
    except ValueError as error:
        problems.add(node.mark, "KVP204", str(error), "write a smaller number, or quote it")
        return None
