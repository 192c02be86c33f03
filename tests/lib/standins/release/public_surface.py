"""What a release promises to people who build on it, by name: operations, policy fields, leaves and commands.

    python tests/lib/standins/release/public_surface.py > tests/vectors/promised-0.1.json   # once: at a release

Names alone: what they mean is for other tests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

Surface = dict[str, dict[str, dict[str, list[str]]]]


def surface() -> Surface:
    """What this tree offers, by kind and name; each with lists of the names of its parts."""
    from kvcustody.audit.leaf import LEAF_KEYS
    from kvcustody.console.command_table import every_command
    from kvcustody.governance.api.openapi_document import whole_document
    from kvcustody.policies.workbench.json_schema import schema

    return {
        "operations": dict(_operations(whole_document())),
        "policy": {
            name: {"fields": sorted(section["properties"]), "required": sorted(section.get("required", ()))}
            for name, section in [("policy", schema()), *schema()["$defs"].items()]
            if "properties" in section
        },
        "leaves": {kind: {"fields": sorted(keys)} for kind, keys in LEAF_KEYS.items()},
        "commands": {
            name: {"fields": sorted({flag for option in command.params for flag in option.opts if flag[:2] == "--"})}
            for name, command in every_command()
        },
    }


def _operations(document: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, list[str]]]]:
    def resolved(part: Mapping[str, Any]) -> Mapping[str, Any]:
        name = part.get("$ref", "")
        found: Mapping[str, Any] = document["components"]["schemas"][name.rsplit("/", 1)[-1]] if name else part
        return found

    for path, item in document["paths"].items():
        for method, operation in item.items():
            parameters = operation.get("parameters", ())
            content = operation.get("requestBody", {}).get("content", {})
            body = resolved(content.get("application/json", {}).get("schema", {}))
            answers = [answer for status, answer in operation["responses"].items() if status.startswith("2")]
            schemas = [
                resolved(form.get("schema", {})) for answer in answers for form in answer.get("content", {}).values()
            ]
            required = [one["name"] for one in parameters if one.get("required")] + list(body.get("required", ()))
            yield (
                f"{method.upper()} {path}",
                {
                    "takes": sorted({one["name"] for one in parameters} | set(body.get("properties", ()))),
                    "required": sorted(required),
                    "fields": sorted({name for schema in schemas for name in schema.get("properties", ())}),
                },
            )


def broken(promised: Surface, offered: Surface) -> list[str]:
    """What was promised and is not kept: a name that is gone, or a part that has to be given from now on."""
    problems = []
    for kind, names in promised.items():
        for name, parts in names.items():
            now = offered.get(kind, {}).get(name)
            if now is None:
                problems.append(f"{kind}: `{name}` is gone")
                continue
            for part in ("fields", "takes"):
                gone = set(parts.get(part, ())) - set(now.get(part, ()))
                problems += [f"{kind}: `{name}` lacks `{each}`" for each in sorted(gone)]
            new = set(now.get("required", ())) - set(parts.get("required", ()))
            problems += [f"{kind}: `{name}` requires `{each}`, which was not required" for each in sorted(new)]
    return problems


def written(content: Surface) -> str:
    """As JSON, a line for each name."""
    kinds = []
    for kind, names in content.items():
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(parts)}" for name, parts in sorted(names.items()))
        kinds.append(f" {json.dumps(kind)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(kinds) + "\n}\n"


if __name__ == "__main__":
    print(written(surface()), end="")
