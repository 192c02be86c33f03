"""Read and write a policy's YAML with its comments and quotes, in the standard layout. The only user of `ruamel.yaml`.

What it reads was loaded as a policy before: the strict reader (`yaml_nodes`) decides what a document says.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import YAMLError
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

WIDTH = 120
LayoutErrors = (YAMLError, ValueError, TypeError, AttributeError, NotImplementedError, AssertionError)


def read(text: str) -> Any:
    """Return the document as mappings and lists that keep comments; raises one of `LayoutErrors`."""
    return _yaml().load(text)


def write(document: Any) -> str:
    """Return the document in the standard layout; raises one of `LayoutErrors`."""
    out = io.StringIO()
    _yaml().dump(document, out)
    return out.getvalue()


def block(values: Mapping[str, Any] | None = None) -> Any:
    """Return a mapping with one line for each entry."""
    return CommentedMap(values or {})


def one_line(values: Mapping[str, Any] | Sequence[Any]) -> Any:
    """Return a mapping or a list that stays on one line."""
    node = CommentedMap(values) if isinstance(values, Mapping) else CommentedSeq(values)
    node.fa.set_flow_style()
    return node


def lines() -> Any:
    """Return an empty list that will have one line for each entry."""
    return CommentedSeq()


def quoted(text: str) -> Any:
    """Return a text that is written in double quotes."""
    return DoubleQuotedScalarString(text)


def _yaml() -> YAML:
    yaml = YAML(typ="rt")
    yaml.preserve_quotes = True
    yaml.width = WIDTH
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.allow_duplicate_keys = False
    return yaml
