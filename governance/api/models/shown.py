"""Models made from the library's own facts, so that each fact is defined once.

1. A model has the fields of its fact, in their order; a field that the library adds is shown and documented at once.
"""

from __future__ import annotations

from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from kvcustody.audit.reports.document import DocumentKind, KeyEnrolment, Signature


def shown(
    fact: type, name: str = "", example: dict[str, Any] | None = None, *, parts: dict[str, Any] | None = None
) -> type[BaseModel]:
    """Return the model of a named tuple; `parts` are the models of fields that are facts themselves."""
    hints = get_type_hints(fact) | (parts or {})
    fields: dict[str, Any] = {field: (hints[field], ...) for field in fact._fields}  # type: ignore[attr-defined]
    config = ConfigDict(json_schema_extra={"examples": [example or _example(hints)]})
    return create_model(name or fact.__name__, __config__=config, __doc__=fact.__doc__, **fields)


def page_of(item: type[BaseModel], name: str) -> type[BaseModel]:
    """Return the model of a page; `next` is the cursor of the following page, null on the last."""
    extra = item.model_config.get("json_schema_extra")
    assert isinstance(extra, dict)
    config = ConfigDict(json_schema_extra={"examples": [{"items": extra["examples"], "next": None}]})
    fields: dict[str, Any] = {"items": (list[item], ...), "next": (str | None, None)}  # type: ignore[valid-type]
    return create_model(name, __config__=config, __doc__=f"A page of {name.lower()}.", **fields)


_EXAMPLES: dict[Any, Any] = {str: "acme", int: 7, bool: True, float: 1.0, bytes: "", dict: {}}


def _example(hints: dict[str, Any]) -> dict[str, Any]:
    return {name: _EXAMPLES.get(hint, {} if "dict" in str(hint) else None) for name, hint in hints.items()}


_ENROLMENT = KeyEnrolment("{…}", "…")._asdict()
_KEYS = list[shown(KeyEnrolment, "KeyEnrolmentModel", _ENROLMENT)]  # type: ignore[misc,valid-type]
SignatureModel = shown(
    Signature,
    "SignatureModel",
    Signature("kvcustody.example/ledger/report+0a1b2c3d+…", "0a1b2c3d", "…")._asdict() | {"enrolments": [_ENROLMENT]},
    parts={"enrolments": _KEYS},
)


class SignedDocument(BaseModel):
    """What every document has besides its facts; an unsigned one has no signature."""

    schema_name: str = Field(alias="schema")
    signature: SignatureModel | None = None  # type: ignore[valid-type]


def of_document(facts: dict[str, Any], kind: DocumentKind, key: str) -> ConfigDict:
    """The configuration of a model of a kind of document, with an example that `key` signed."""
    enrolments = [_ENROLMENT] if kind.signer == "reports" else []
    signature = Signature(key, "0a1b2c3d", "…")._asdict() | {"enrolments": enrolments}
    example = facts | {"schema": kind.schema, "signature": signature}
    return ConfigDict(extra="allow", json_schema_extra={"examples": [example]})
