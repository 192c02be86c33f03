"""Start a policy: a library policy with your names, comments and rationale included.

1. What comes out is sound: it is validated before it is given.
2. Grants and segments are never invented: those of the library that name its example tenants are left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from kvcustody.errors import PolicyError
from kvcustody.policies import library
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.workbench.format import fmt
from kvcustody.policies.workbench.round_trip import block, one_line, quoted, read, write

_WORDS = frozenset({"yes", "off", "true", "false", "null"})
_TENANT_SECTIONS = ("groups", "segments", "grants")


def start(template: str, *, name: str | None = None, tenants: Sequence[str] = ()) -> str:
    """Return the text of a new policy based on a library policy; without `tenants` the example tenants stay.

    Raises `ConfigError` for an unknown template and `PolicyRejected` for a name that the language refuses.
    """
    text = library.source(template)
    document = read(text)
    if name is not None:
        document["name"] = _written(name)
    if tenants:
        _rename(document, tenants)
    result = fmt(write(document), name=f"{name or template}.yaml").text
    load_policy(result, name=f"{name or template}.yaml")
    return result


def _rename(document: Any, tenants: Sequence[str]) -> None:
    """Put the given tenants in place of the examples; shares of the pool follow their number."""
    if len(set(tenants)) != len(tenants):
        raise PolicyError("a tenant is given twice; name each once", tenants=list(tenants))
    examples = [tenant for tenant in document["tenants"] if tenant != "default"]
    default = document["tenants"].get("default")
    strict = document["profile"] != "shared"
    room = 100 - (_percent(default) if default else 0)
    entries = block()
    for tenant in tenants:
        share = f"{min(20, room // (2 * len(tenants)))}%"
        quota = one_line({"guaranteed": share, "cap": share if strict else "60%"})
        entries[_written(tenant)] = one_line({"quota": quota})
    if default is not None:
        entries["default"] = default
    document["tenants"] = entries
    for section in _TENANT_SECTIONS:
        document.pop(section, None)
    rules = document.get("classify", [])
    kept = [rule for rule in rules if rule["tenant"] not in examples]
    for rule in [rule for rule in rules if rule not in kept]:
        rules.remove(rule)
    for rule in [rule for rule in document.get("rules", []) if _names(rule, examples)]:
        document["rules"].remove(rule)


def _written(name: str) -> Any:
    """Quoted, unless every YAML version reads it as the same word."""
    plain = re.fullmatch(r"[A-Za-z][A-Za-z0-9._-]{2,}", name) and name.lower() not in _WORDS
    return name if plain else quoted(name)


def _percent(default: Any) -> int:
    """Return the whole percentage that is guaranteed to all unlisted tenants together, rounded up."""
    share = str(default.get("quota", {}).get("guaranteed", "0%")).removesuffix("%")
    return -int(-float(share) * int(default.get("tenants_max", 1)) // 1)


def _names(rule: Any, tenants: Sequence[str]) -> bool:
    terms = rule.get("when", {})
    said = [terms.get("reader"), terms.get("owner")]
    words = [word for term in said for word in (term if isinstance(term, list) else [term])]
    return any(word in tenants for word in words)
