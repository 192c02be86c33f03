"""The OpenAPI 3.1 document: FastAPI generates it from the declared operations.

What operations have in common stands in it once, as a component.

1. An answer of a problem is a component, named after the types of problems that it tells. A parameter that several
   operations have alike is one, named as the parameter; a second form of a name has a number.
2. A reader of the document follows references (`whole` has none of parameters and answers).
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from functools import cache
from typing import Annotated, Any, get_args

import orjson
from fastapi import Depends, FastAPI, Response, params
from fastapi.responses import JSONResponse

from kvcustody._version import __version__
from kvcustody.governance.api.declarations import every_operation
from kvcustody.governance.api.given import Given
from kvcustody.governance.api.http.answer_times import date_schemas
from kvcustody.governance.api.http.parameter_descriptions import describe_parameters
from kvcustody.governance.api.models.problem import ProblemDocument
from kvcustody.governance.api.operation_function import DeclaredOperation
from kvcustody.governance.service.operations.parameters import RequestPart
from kvcustody.governance.service.problem_details import MEDIA_TYPE, TYPES

_DESCRIPTION = """Custody of KV caches: who may reuse a block, for how long it may exist, and proof that it is gone.

Send one API key or OpenID Connect token as `Authorization: Bearer …`. What you may see follows from it alone: what is
absent and what is somebody else's are answered alike. Refusals are problem details (RFC 9457); their types are stable.
Pages are read with `cursor`, which fits the same filters only; `as_of` repeats a page as it was at a checkpoint."""
_TAGS = {
    "self": "Your own principal, keys and session.",
    "principals": "Principals and their keys: enrolled with the bootstrap key, disabled by a key custodian.",
    "keys": "The keys behind the ledger: its signing key, subjects' keys, tenants' keys on every worker.",
    "custody": "Cached blocks: their owner, deadline and end.",
    "audit": "The ledger: its events, its checkpoints and proofs.",
    "erasures": "Erasure requests and their certificates.",
    "cases": "Data subject requests, from receipt to the answer.",
    "evidence": "Audit reports and checks of the whole ledger. They run as jobs.",
    "policies": "From a draft to an active revision.",
    "operations": "Workers, quotas and capacity, scans, webhooks, health.",
    "jobs": "Long-running work: exports and checks.",
    "worker": "The workers' interface: fetch policies, send ledger batches, confirm erasures.",
}
_ALWAYS = (
    "unauthenticated",
    "forbidden",
    "too-many-requests",
    "malformed",
    "invalid",
    "internal",
    "unavailable",
)
_IDEMPOTENCY_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": True,
    "description": "A unique key for this action. Repeating the request with the same key returns the same answer.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 200, "pattern": "^[ -~]+$"},
    "example": "3f6c0c1e-6a4f-4d5e-9a53-0d3c2f8e7b10",
}
_RETRY_AFTER = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "string"}}}
_METHODS = frozenset({"get", "put", "post", "delete", "patch"})


def routed(every: Iterable[DeclaredOperation]) -> FastAPI:
    """Return an application with a route for each operation, for documentation only."""
    app = FastAPI(
        title="kvcustody",
        version=__version__,
        summary="Policy-controlled custody of KV caches, with evidence.",
        description=_DESCRIPTION,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        openapi_tags=[{"name": name, "description": text} for name, text in _TAGS.items()],
    )
    for one in every:
        _add_route(app, one)
    return app


def _add_route(app: FastAPI, declared: DeclaredOperation) -> None:
    operation = declared.operation
    names = {
        *(_ALWAYS if operation.action is not None else ("internal", "unavailable", "malformed")),
        *declared.problems,
    }
    if operation.keyed:
        names |= {"idempotency-key-required", "in-flight", "key-reused", "conflict", "too-large"}
    if operation.method in ("PUT", "POST", "DELETE"):
        names |= {"too-large", "csrf"}
    extra: dict[str, Any] = {"x-kvcustody-action": operation.action and operation.action.value}
    extra |= {"x-kvcustody-recorded": operation.recorded, "x-kvcustody-exports": operation.exports}
    extra |= declared.more
    if operation.action is not None:
        extra["security"] = [{"bearer": []}, {"session": []}]
    if operation.keyed:
        extra["parameters"] = [*extra.get("parameters", ()), _IDEMPOTENCY_KEY]
    responses: dict[int | str, dict[str, Any]] = {}
    if declared.answers is None:
        content = {declared.media: {"schema": {"type": "string"}}} if declared.status != 204 else {}
        text = "Done." if declared.status == 204 else "The content."
        responses[declared.status] = {"description": text, "content": content}
    app.add_api_route(
        operation.path,
        _as_fastapi_says(declared.function),
        methods=[operation.method],
        operation_id=operation.name,
        summary=operation.title,
        status_code=declared.status,
        response_model=declared.answers,
        response_class=Response if declared.answers is None else JSONResponse,
        responses=responses | _problem_responses(names),
        tags=[operation.tag],
        openapi_extra=extra,
    )


_PLACES = {"path": params.Path, "query": params.Query, "header": params.Header}


def _nothing() -> None:
    """Stands for what is given to a function."""


def _as_fastapi_says(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function with the signature of another, each parameter's place as FastAPI asks for it. It is never called."""

    def documented() -> None:
        raise NotImplementedError

    stated = inspect.signature(function, eval_str=True)
    translated = [
        one.replace(annotation=_translated(one.annotation), kind=inspect.Parameter.KEYWORD_ONLY)
        for one in stated.parameters.values()
    ]
    documented.__doc__ = function.__doc__
    described = stated.replace(parameters=translated, return_annotation=inspect.Signature.empty)
    documented.__signature__ = described  # type: ignore[attr-defined]
    return documented


def _translated(annotation: Any) -> Any:
    said = getattr(annotation, "__metadata__", ())
    if any(isinstance(item, Given) for item in said):
        return Annotated[None, Depends(_nothing)]
    words = (_PLACES[item.name](**item.said) if isinstance(item, RequestPart) else item for item in said)
    return Annotated[(get_args(annotation)[0], *words)] if said else annotation


@cache
def document() -> bytes:
    """The API document."""
    made = whole_document()
    share(made)
    return orjson.dumps(made, option=orjson.OPT_SORT_KEYS)


def whole_document() -> dict[str, Any]:
    """The API document without references to parameters and answers."""
    return whole(routed(every_operation().by_name.values()))


def _problem_responses(names: set[str]) -> dict[int | str, dict[str, Any]]:
    """The answers of these types of problems, by status."""
    responses_by_status: dict[int | str, dict[str, Any]] = {}
    for name in sorted(names):
        kind = TYPES[name]
        entry = responses_by_status.setdefault(kind.status, {"description": "", "content": {MEDIA_TYPE: {}}})
        entry["description"] = " / ".join(filter(None, (entry["description"], kind.title)))
        content = entry["content"][MEDIA_TYPE]
        content["schema"] = {"$ref": "#/components/schemas/ProblemDocument"}
        example = {"type": kind.uri, "title": kind.title, "status": kind.status}
        content.setdefault("examples", {})[name] = {"value": example}
        if kind.status in (429, 503):
            entry["headers"] = _RETRY_AFTER
    return responses_by_status


def whole(app: FastAPI) -> dict[str, Any]:
    """Return the document with every parameter and answer written out where it is used."""
    document = deepcopy(app.openapi())  # FastAPI keeps its own
    components = document.setdefault("components", {})
    components["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer", "description": "An API key, or a token."},
        "session": {"type": "apiKey", "in": "cookie", "name": "kvcustody"},
    }
    schemas = components.setdefault("schemas", {})
    problem = ProblemDocument.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas |= problem.pop("$defs", {}) | {"ProblemDocument": problem}
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    describe_parameters(document)
    date_schemas(document)
    return document


def share(document: dict[str, Any]) -> None:
    """Move what operations have in common into components (rule 1)."""
    parameters, responses = _Components(document, "parameters"), _Components(document, "responses")
    used = Counter(_text(one) for each in _operations(document) for one in each.get("parameters", ()))
    for operation in _operations(document):
        given = operation.get("parameters", ())
        operation["parameters"] = [parameters.named(one["name"], one) if used[_text(one)] > 1 else one for one in given]
        if not given:
            del operation["parameters"]
        for status, answer in operation["responses"].items():
            told = answer.get("content", {}).get(MEDIA_TYPE, {}).get("examples", {})
            if told:
                operation["responses"][status] = responses.named(".".join(told), answer)


def _operations(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for item in document["paths"].values():
        yield from (each for method, each in item.items() if method in _METHODS)


def _text(part: dict[str, Any]) -> bytes:
    return orjson.dumps(part, option=orjson.OPT_SORT_KEYS)


class _Components:
    """The components of one kind, each under one name."""

    def __init__(self, document: dict[str, Any], kind: str) -> None:
        self._kind = kind
        self._made: dict[str, Any] = document["components"].setdefault(kind, {})
        self._names: dict[bytes, str] = {}
        self._forms: Counter[str] = Counter()

    def named(self, name: str, part: dict[str, Any]) -> dict[str, str]:
        """A reference to the component with this content."""
        text = _text(part)
        if text not in self._names:
            self._forms[name] += 1
            self._names[text] = name if self._forms[name] == 1 else f"{name}-{self._forms[name]}"
            self._made[self._names[text]] = part
        return {"$ref": f"#/components/{self._kind}/{self._names[text]}"}
