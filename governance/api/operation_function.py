"""Calls an operation's function with the arguments of a request.

1. The arguments of a function are read by one validator for each place, for requests and local calls alike. So both
   accept and refuse the same values with the same messages, which are those of FastAPI.
2. A function sees what it is given (`given`), and of the call what it declares.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model

from kvcustody.governance.api.given import Given, Wire
from kvcustody.governance.api.http.answer_times import model_bytes
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.operations.answer import Answer, Content, FileContent
from kvcustody.governance.service.operations.desk import Desk
from kvcustody.governance.service.operations.operation import Operation
from kvcustody.governance.service.operations.parameters import RequestPart
from kvcustody.governance.service.problem_details import ProblemError

if TYPE_CHECKING:
    from kvcustody.governance.service.service import Service

_ERRORS_SHOWN = 20
Endpoint = Callable[..., Any]
T = TypeVar("T")


class DeclaredOperation(NamedTuple):
    """An operation: its function, the model and the status of its success, and the problems that it may give."""

    operation: Operation
    function: Endpoint
    answers: type[BaseModel] | None
    status: int
    problems: Sequence[str]
    media: str
    more: Mapping[str, Any]
    reads: bool  # what answers it asks a ledger alone, so no service need be open


class Work(Protocol):
    """How a call waits for blocking work (`operations.run.Waiter`)."""

    def __call__(self, act: Callable[[], T], /) -> Awaitable[T]:
        """What `act` gives."""


class OperationFunction:
    """The function of an operation, for calls that have passed the gate."""

    def __init__(self, declared: DeclaredOperation) -> None:
        self._function, self._status = declared.function, declared.status
        ways = (
            declared.function,
            inspect.unwrap(declared.function),
        )  # a group's wrapper is no coroutine function
        self._is_async = any(map(inspect.iscoroutinefunction, ways))
        self._bytes = None if declared.answers is None else model_bytes(declared.answers)
        asked = parameters_of(declared.function, declared.operation.path)
        self._given = [(one.name, one.given) for one in asked if one.given is not None]
        found = {place: _model_of(place, asked) for place in ("path", "query", "header")}
        self._models = [(place, model) for place, model in found.items() if model.model_fields]
        self._body = [(one.name, TypeAdapter(one.annotation)) for one in asked if one.place == "body"]
        self.queries = frozenset(one.alias for one in asked if one.place == "query")

    def check_query(self, query: Mapping[str, str]) -> None:
        """Raise `invalid` for an undeclared parameter: a misspelt filter would filter nothing."""
        if not query.keys() <= self.queries:
            errors = [{"at": "query", "what": "this operation has no such parameter"}]
            raise ProblemError("invalid", errors=errors)

    async def call(self, service: Service, caller: Caller | None, wire: Wire, work: Work) -> Answer | FileContent:
        """Call the function, and return its answer.

        Args:
            service: The service that is asked.
            caller: Who asks; None: somebody without a credential.
            wire: What the call says.
            work: Waits for a function that may block.

        Raises:
            ProblemError: `invalid`, with each text that is wrong; or what the function refuses.
        """
        values = self.arguments({"desk": service, "service": service, "caller": caller, "wire": wire}, wire)
        if self._is_async:
            found = await self._function(**values)
        else:
            found = await work(partial(self._function, **values))
        return self.answer(found)

    def read(self, desk: Desk, caller: Caller, wire: Wire) -> Answer:
        """Call a function that takes only a desk. Raises as `call`."""
        found = self.answer(self._function(**self.arguments({"desk": desk, "caller": caller}, wire)))
        assert isinstance(found, Answer), "only jobs have files"
        return found

    def answer(self, outcome: Any) -> Answer | FileContent:
        """Convert the function's result to an answer; a file stays a file, to be sent in parts."""
        if isinstance(outcome, FileContent):
            return outcome
        if isinstance(outcome, Content):
            return outcome.answer()
        assert self._bytes is not None
        return Content(self._bytes(outcome), status=self._status).answer()

    def arguments(self, given: Mapping[str, Any], wire: Wire) -> dict[str, Any]:
        """Return every argument by name; `given` replaces parts of the call. Raises as `call`."""
        values = {name: given[what] for name, what in self._given}
        if None in values.values():  # the gate was not passed: nothing is answered
            raise ProblemError("unauthenticated")
        content = _content(wire) if self._body and wire.body else None
        texts = {"path": wire.path, "query": wire.query, "header": wire.headers}
        errors: list[Any] = []
        for place, model in self._models:
            found, wrong = _read(model.model_validate, texts[place], place)
            errors += wrong
            if found is not None:
                values |= found.__dict__
        for name, adapter in self._body:
            if not wire.body:
                errors.append({"loc": ("body",), "msg": "Field required"})
            else:
                validate = partial(adapter.validate_python, from_attributes=True)
                values[name], wrong = _read(validate, content, "body")
                errors += wrong
        if errors:
            raise invalid_arguments(errors)
        return values


class Parameter(NamedTuple):
    """One parameter of a function: the source of its value, and its annotated type."""

    name: str
    place: str  # `query`, `path`, `header`, `body`, or `given` for what stands for a part of the call
    annotation: Any
    default: Any  # `...`: required
    given: str | None = None  # which of them

    @property
    def alias(self) -> str:
        """The parameter's name in requests."""
        stated = (getattr(item, "alias", None) for item in getattr(self.annotation, "__metadata__", ()))
        return next(filter(None, stated), self.name)


def parameters_of(endpoint: Endpoint, path: str) -> list[Parameter]:
    """The parameters of the function that answers `path`."""
    parameters = []
    for name, parameter in inspect.signature(endpoint, eval_str=True).parameters.items():
        default = ... if parameter.default is parameter.empty else parameter.default
        annotation = parameter.annotation
        declared = next(
            (item for item in getattr(annotation, "__metadata__", ()) if isinstance(item, Given | RequestPart)),
            None,
        )
        if declared is not None:
            place = "given" if isinstance(declared, Given) else declared.name
        elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
            place = "body"
        else:
            place = "path" if f"{{{name}}}" in path else "query"
        given = declared.what if isinstance(declared, Given) else None
        parameters.append(Parameter(name, place, annotation, default, given))
    return parameters


def _model_of(place: str, asked: list[Parameter]) -> type[BaseModel]:
    """One model of all parameters of a place, each under its alias."""
    made: dict[str, Any] = {item.name: (item.annotation, item.default) for item in asked if item.place == place}
    config = ConfigDict(alias_generator=_header_name) if place == "header" else ConfigDict()
    return create_model(place.title(), __config__=config, **made)


def _header_name(name: str) -> str:
    return name.replace("_", "-")


def _read(validate: Callable[[Any], Any], given: Any, place: str) -> tuple[Any, list[Any]]:
    """What a place says, and what is wrong with it."""
    try:
        return validate(given), []
    except ValidationError as error:
        return None, [{**item, "loc": (place, *item["loc"])} for item in error.errors(include_url=False)]


def _content(wire: Wire) -> Any:
    """The value in a body; the bytes themselves where it does not say that it is JSON."""
    kind = wire.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        return wire.body
    try:
        return json.loads(wire.body)
    except json.JSONDecodeError as error:
        raise invalid_arguments([{"loc": ("body", error.pos), "msg": "JSON decode error"}]) from None


def invalid_arguments(errors: Sequence[Any]) -> ProblemError:
    """Return the problem for values that a model refuses: place and reason, never the value."""
    found = [
        {"at": ".".join(str(part) for part in item["loc"])[:200], "what": str(item["msg"])[:200]}
        for item in errors[:_ERRORS_SHOWN]
    ]
    return ProblemError("invalid", errors=found)
