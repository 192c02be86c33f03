"""Commands made from the API's operations: each operation has a command, with its parameters as options.

1. A required part of a path or a query is an argument. Every other parameter and each part of the body is an option,
   under its name in the document. An `order` of newest and oldest is the flag `--oldest-first`; without it the newest
   come first. An `order` that has other values too is an option as well.
2. A text of the body may be `@FILE`. A part that is neither text, number, flag nor list of texts is given as JSON.
3. A job is followed to its end with `--wait`, and always on the ledger itself; its files go to `--out`.
4. A value that does not fit its schema is refused before any request is sent. The message names the option.
"""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from kvcustody.console.api.api_reply import ApiReply
from kvcustody.console.api.client import Asker, asking, call, every_page, one_segment
from kvcustody.console.api.command_parts import Command, Part
from kvcustody.console.api.presenters import PRESENTERS
from kvcustody.console.command import Json, check_once, make_table, print_json, printable, say, stdout
from kvcustody.console.options import ActKey, OldestFirst, ServiceSource, moment_us
from kvcustody.console.render.number_format import duration
from kvcustody.errors import ConfigError
from kvcustody.files import evidence_folder, evidence_mode, write_file
from kvcustody.governance.api.http.answer_times import LENGTHS, MOMENTS
from kvcustody.governance.service.operations.parameter_groups import parameters_of, taken
from kvcustody.times import WHOLE_NUMBER, readable

_SHOWN_MAX = 40  # characters of values that a help shows beside an option
_BY_TIME = {"newest", "oldest"}
_TYPES: dict[str, type] = {"integer": int, "number": float, "boolean": bool, "string": str}
All = Annotated[bool, typer.Option("--all", help="Follow the pages to the last one.")]
Wait = Annotated[bool, typer.Option("--wait", help="Follow the job to its end.")]
Out = Annotated[Path | None, typer.Option("--out", help="The file for content, or the folder for the files of a job.")]
Body = Annotated[Path | None, typer.Option("--body", help="File with the whole body.", metavar="FILE")]


def function_of(command: Command) -> Callable[..., None]:
    """Return the function that typer runs; its signature is the command's.

    The commands are those of the API's own description, read when the program starts, and typer takes a command's
    options from a signature alone: there is no source text that could state them, so the signature is made.
    """

    def run(**given: Any) -> None:
        source = taken(ServiceSource, given)
        check_once(source.ctx)
        as_json, out = given.pop("as_json"), given.pop("out")
        follow = {name: given.pop(name, False) for name in ("all_pages", "wait")}
        values = _values(command, given)
        whole = given.get("body")
        body = None if whole is None else _read(whole)
        with asking(source, command.operation) as asker:
            answer = call(asker, command.operation, values, body=body, key=given.get("key"))
            if command.job and (follow["wait"] or not asker.lasting):
                answer = finished(asker, answer, out)
            elif command.paged and follow["all_pages"]:
                answer = every_page(asker, command.operation, values, answer)
        presenter = PRESENTERS.get(command.operation)
        if out is not None and presenter is not None and presenter.content:
            answer = answer._replace(body=orjson.loads(answer.body)[presenter.content].encode())
        if presenter is None or as_json or out is not None:
            tell(answer, as_json, None if command.job else out)
        else:
            presenter.show(orjson.loads(answer.body), values)

    run.__name__ = re.sub(r"\W", "_", command.name)
    run.__doc__ = command.says
    run.__signature__ = inspect.Signature(list(_signature(command)))  # type: ignore[attr-defined]
    run.__annotations__ = {name: part.annotation for name, part in run.__signature__.parameters.items()}  # type: ignore[attr-defined]
    return run


def _signature(command: Command) -> Iterator[inspect.Parameter]:
    """Yield arguments first, then options, then the options that every command has."""
    for part in sorted(command.parts, key=lambda part: not part.is_argument):
        kind = _kind(part.schema)
        shown = _shown(part)
        orders = _orders(part)
        if orders >= _BY_TIME:
            yield _parameter("oldest_first", OldestFirst, False)
        if orders == _BY_TIME:
            continue
        bounds: dict[str, Any] = {"min": part.schema.get("minimum"), "max": part.schema.get("maximum")}
        if part.is_argument:
            note: Any = typer.Argument(help=part.says or None, metavar=part.name.upper(), **bounds)
            yield _parameter(part.here, Annotated[kind, note], inspect.Parameter.empty)
            continue
        flags = f"--{shown}/--no-{shown}" if kind is bool else f"--{shown}"
        long = sum(map(len, part.schema.get("enum", ()))) > _SHOWN_MAX  # it would leave the helps no room
        metavar = part.name.upper() if long else None
        note = typer.Option(flags, help=part.says or None, metavar=metavar, **bounds)
        yield _parameter(part.here, Annotated[kind | None, note], None)
    if any(part.place == "body" for part in command.parts) or command.raw:
        yield _parameter("body", Body, None)
    if command.keyed:
        yield _parameter("key", ActKey, None)
    if command.paged:
        yield _parameter("all_pages", All, False)
    if command.job:
        yield _parameter("wait", Wait, False)
    yield _parameter("out", Out, None)
    yield from parameters_of(ServiceSource)
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


def _values(command: Command, given: dict[str, Any]) -> dict[str, Any]:
    """Return the typed values by parameter name."""
    values = {part.name: _value(part, given.get(part.here)) for part in command.parts}
    if any(_orders(part) >= _BY_TIME for part in command.parts) and values["order"] is None:
        values["order"] = "oldest" if given.get("oldest_first") else "newest"
    return values


def _orders(part: Part) -> set[str]:
    return set(part.schema.get("enum", ())) if part.name == "order" else set()


def _shown(part: Part) -> str:
    return part.name.replace("_", "-").lower()


def _value(part: Part, value: Any) -> Any:
    """Return a parameter's typed value, or a part of the body by rule 2; None: left out."""
    if value is None or value == []:
        return None
    if part.place != "body":
        _check(part, value)
        return value
    if part.schema.get("type") == "array":
        return [_text(item) for item in value]
    if isinstance(value, str) and part.schema.get("type") == "object":
        try:
            return orjson.loads(_text(value))
        except orjson.JSONDecodeError:
            raise ConfigError(f"--{part.name}: is not JSON") from None
    return _text(value) if isinstance(value, str) else value


def _check(part: Part, value: Any) -> None:
    """Raise `ConfigError` for a text that does not match its parameter's schema (rule 4)."""
    if not isinstance(value, str):
        return
    name = part.name.upper() if part.is_argument else f"--{_shown(part)}"
    if part.schema.get("format") == "date-time" and WHOLE_NUMBER.fullmatch(value) is None:
        moment_us(value, name)
    pattern = part.schema.get("pattern")
    if pattern is not None and re.search(pattern, value) is None:
        says = f": {part.says[:1].lower()}{part.says[1:].rstrip('.')}" if part.says else ""
        raise ConfigError(f"{name} `{value}` does not fit `{pattern}`{says}")


def _text(value: str) -> str:
    return _read(Path(value[1:])).decode("utf-8", "replace") if value.startswith("@") else value


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"`{path}`: {error.strerror}", path=path) from None


# Printing an answer of the API: a job is followed to its end, files and contents are written, a page becomes a table,
# and any other answer becomes names and values.

_KEEP = 0.2


def finished(asker: Asker, answer: ApiReply, out: Path | None) -> ApiReply:
    """Wait until a job has ended, write its files into the folder `out`, and return it (rule 3 of `api_commands`)."""
    job = orjson.loads(answer.body)["job"]
    while (job_state := orjson.loads(call(asker, "getJob", {"job": job}).body))["ended_us"] is None:
        time.sleep(_KEEP)
    files = (job_state["result"] or {}).get("files", [])
    if out is None and files and not asker.lasting:
        raise ConfigError("--out is needed: this job's files are deleted when the command ends")
    for item in files if out is not None else ():
        name = one_segment(item["name"])  # an answer never says where in the file system it goes
        _write(Path(str(out)) / name, call(asker, "getJobFile", {"job": job, "name": name}).body)
    return answer._replace(body=orjson.dumps(job_state))


def tell(answer: ApiReply, as_json: bool, out: Path | None) -> None:
    """Print an answer, or write its content to `out`."""
    is_json = answer.media.startswith("application/json")
    if out is not None:
        _write(out, answer.body)
        if as_json:
            print_json({"path": str(out), "bytes": len(answer.body), "etag": answer.etag})
    elif as_json:
        text = None if not answer.body else answer.body.decode("utf-8", "replace")
        print_json(orjson.loads(answer.body) if is_json else {"content": text})
    elif is_json:
        show(orjson.loads(answer.body))
    else:
        typer.echo(answer.body, nl=False)


def _write(path: Path, data: bytes) -> None:
    try:
        evidence_folder(path.parent)
        write_file(path, data, mode=evidence_mode())
    except OSError as error:
        raise ConfigError(f"`{path}`: {error.strerror}", path=path) from None


_COLUMNS_MAX = 8


def show(value: Any) -> None:
    """Print an answer."""
    if isinstance(value, dict) and isinstance(value.get("items"), list):
        _page(value["items"])
        if value.get("next"):
            say(f"more: --cursor {value['next']}")
        return
    for name, text in shown_fields(value).items():
        say(f"{printable(name)}: {printable(text)}")


def shown_fields(item: dict[str, Any]) -> dict[str, str]:
    """Return an answer's fields for people: a moment once and to the second, a length of time in its unit."""
    fields: dict[str, str] = {}
    for name, value in item.items():
        base = name.removesuffix("_us")
        if name in MOMENTS:
            fields[f"{base} (UTC)"] = readable(value, none="")
        elif name in LENGTHS:
            fields[base] = "" if value is None else duration(value)
        elif f"{name}_us" not in item or f"{name}_us" not in MOMENTS:
            fields[name] = _cell(value)
    return fields


def _page(items: list[Any]) -> None:
    if not items:
        say("nothing")
        return
    if not all(isinstance(item, dict) for item in items):
        for item in items:
            say(printable(_cell(item)))
        return
    rows = [shown_fields(item) for item in items]
    names = list(rows[0])[:_COLUMNS_MAX]
    table = make_table("", *names, left=len(names))
    for row in rows:
        table.add_row(*(row.get(name, "") for name in names))
    stdout().print(table, markup=False)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return ", ".join(value)
    return value if isinstance(value, str) else orjson.dumps(value).decode()
