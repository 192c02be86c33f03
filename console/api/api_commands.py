"""Commands of the API: an operation that is declared has its command, with its parameters as options.

1. A path parameter is an argument, a query parameter or a part of the body an option, by the name in the document.
2. A text of the body may be `@FILE`; a part that is neither text, number, flag nor list of texts is given as JSON.
3. A job is followed to its end with `--wait`, and always on the ledger itself; its files go to `--out`.
4. An erasure that names neither a subject nor a session asks for the name once more, or for `--yes`.
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import orjson
import typer

from kvcustody.console.api.client import ApiReply, Asker, Where, asking
from kvcustody.console.api.print_answer import finished, one_segment, tell
from kvcustody.console.command import Json, Yes, confirm
from kvcustody.errors import ConfigError
from kvcustody.governance.service.operations.parameter_groups import parameters_of, taken

FILE = "commands.json"  # made by the build and by `make setup`, not committed
_ERASING = "requestErasure"
_TYPES: dict[str, type] = {"integer": int, "number": float, "boolean": bool, "string": str}
All = Annotated[bool, typer.Option("--all", help="Follow the pages to the last one.")]
Key = Annotated[str | None, typer.Option("--idempotency-key", help="The act's own key; default: a new one.")]
Wait = Annotated[bool, typer.Option("--wait", help="Follow the job to its end.")]
Out = Annotated[
    Path | None, typer.Option("--out", help="Where content goes: a file; the files of a job: a folder.")
]
Body = Annotated[Path | None, typer.Option("--body", help="File with the whole body.", metavar="FILE")]


class Part(NamedTuple):
    """One parameter: its name in the document and here, where it goes, its schema."""

    name: str
    here: str
    place: str  # path, query, header, body
    schema: dict[str, Any]
    required: bool
    says: str


class Command(NamedTuple):
    """One operation as a command."""

    name: str
    operation: str
    method: str
    path: str
    says: str
    keyed: bool
    paged: bool
    job: bool
    raw: str  # the media type of a body that is not JSON
    parts: tuple[Part, ...]


def function_of(command: Command) -> Callable[..., None]:
    """What typer runs: a function whose signature is the command's.

    The commands are those of the API's own description, read when the program starts, and typer takes a command's
    options from a signature alone: there is no source text that could state them, so the signature is made.
    """

    def run(**given: Any) -> None:
        where = taken(Where, given)
        as_json, out = given.pop("as_json"), given.pop("out")
        follow = {name: given.pop(name, False) for name in ("all_pages", "wait")}
        with asking(where) as asker:
            answer = _ask(asker, command, given)
            if command.job and (follow["wait"] or not asker.lasting):
                answer = finished(asker, answer, out)
            elif command.paged and follow["all_pages"]:
                answer = _whole(asker, command, given, answer)
        tell(answer, as_json, None if command.job else out)

    run.__name__ = command.name.replace("-", "_")
    run.__doc__ = command.says
    run.__signature__ = inspect.Signature(list(_signature(command)))  # type: ignore[attr-defined]
    run.__annotations__ = {name: part.annotation for name, part in run.__signature__.parameters.items()}  # type: ignore[attr-defined]
    return run


def _signature(command: Command) -> Iterator[inspect.Parameter]:
    """Arguments first, then options, then those that every command has."""
    for part in sorted(command.parts, key=lambda part: part.place != "path"):
        kind = _kind(part.schema)
        shown = part.name.replace("_", "-").lower()
        if part.place == "path":
            note: Any = typer.Argument(help=part.says or None, metavar=part.name.upper())
            yield _parameter(part.here, Annotated[kind, note], inspect.Parameter.empty)
            continue
        flags = f"--{shown}/--no-{shown}" if kind is bool else f"--{shown}"
        note = typer.Option(flags, help=part.says or None)
        required = part.required and part.place != "body"
        default = inspect.Parameter.empty if required else None
        yield _parameter(part.here, Annotated[kind if required else kind | None, note], default)
    if any(part.place == "body" for part in command.parts) or command.raw:
        yield _parameter("body", Body, None)
    if command.keyed:
        yield _parameter("key", Key, None)
    if command.paged:
        yield _parameter("all_pages", All, False)
    if command.job:
        yield _parameter("wait", Wait, False)
    if command.operation == _ERASING:
        yield _parameter("yes", Yes, False)
    yield _parameter("out", Out, None)
    yield from parameters_of(Where)
    yield _parameter("as_json", Json, False)


def _parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)


def _kind(schema: dict[str, Any]) -> Any:
    if schema.get("type") == "array":
        kind = _kind(schema["items"]) if "enum" in schema["items"] else str
        return list[kind]  # type: ignore[valid-type]
    if "enum" in schema:  # the values are offered by the shell, and others refused
        return StrEnum("Choice", {value: value for value in schema["enum"]})
    return _TYPES.get(schema.get("type", "string"), str)


def _ask(asker: Asker, command: Command, given: dict[str, Any]) -> ApiReply:
    path, query, headers, body = command.path, {}, {}, {}
    for part in command.parts:
        value = given.get(part.here)
        if value is None or value == []:
            continue
        if part.place == "path":
            path = path.replace("{" + part.name + "}", one_segment(str(value)))
        elif part.place == "query":
            query[part.name] = str(value).lower() if isinstance(value, bool) else str(value)
        elif part.place == "header":
            headers[part.name] = str(value)
        else:
            body[part.name] = _value(part, value)
    content = _body(command, given.get("body"), body)
    if command.operation == _ERASING and content is not None:
        _confirm(content, yes=given.get("yes", False))
    if content is not None:
        headers["Content-Type"] = command.raw or "application/json"
    if command.keyed:
        headers["Idempotency-Key"] = given.get("key") or uuid.uuid4().hex
    return asker.ask(command.method, path, query=query, headers=headers, body=content)


def _confirm(content: bytes, *, yes: bool) -> None:
    """Have somebody confirm an erasure of more than one subject or session (rule 4)."""
    try:
        what = orjson.loads(content)
    except orjson.JSONDecodeError:
        return  # the service says what is wrong with it
    if isinstance(what, dict) and not (what.get("subject") or what.get("session")):
        tenant = what.get("tenant")
        word = tenant if isinstance(tenant, str) else "everything"
        confirm(f"everything of `{tenant}`" if tenant else "everything that this key reaches", word, yes=yes)


def _body(command: Command, whole: Path | None, parts: dict[str, Any]) -> bytes | None:
    if whole is not None:
        if parts:
            raise ConfigError("--body is the whole body; leave out its parts")
        return _read(whole)
    if any(part.place == "body" for part in command.parts):
        return orjson.dumps(parts)
    return b"" if command.raw else None


def _value(part: Part, value: Any) -> Any:
    """A part of the body from what was typed (rule 2)."""
    if part.schema.get("type") == "array":
        return [_text(item) for item in value]
    if isinstance(value, str) and part.schema.get("type") == "object":
        try:
            return orjson.loads(_text(value))
        except orjson.JSONDecodeError:
            raise ConfigError(f"--{part.name}: is not JSON") from None
    return _text(value) if isinstance(value, str) else value


def _text(value: str) -> str:
    return _read(Path(value[1:])).decode("utf-8", "replace") if value.startswith("@") else value


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"`{path}`: {error.strerror}", path=path) from None


def _whole(asker: Asker, command: Command, given: dict[str, Any], answer: ApiReply) -> ApiReply:
    """Every page as one."""
    page = orjson.loads(answer.body)
    items = page["items"]
    while page["next"] is not None:
        page = orjson.loads(_ask(asker, command, {**given, "in_cursor": page["next"]}).body)
        items += page["items"]
    return answer._replace(body=orjson.dumps(page | {"items": items}))
