"""What is done with an answer of the API: a job is followed to its end, its files and contents are written, a page is
printed as a table, anything else as names and values.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import orjson
import typer

from kvcustody.console.api.api_reply import ApiReply
from kvcustody.console.api.client import Asker, call, one_segment
from kvcustody.console.command import make_table, print_json, printable, say, stdout
from kvcustody.errors import ConfigError
from kvcustody.files import evidence_folder, evidence_mode, write_file

_KEEP = 0.2


def finished(asker: Asker, answer: ApiReply, out: Path | None) -> ApiReply:
    """A job at its end, its files in the folder `out` (rule 3 of `api_commands`)."""
    job = orjson.loads(answer.body)["job"]
    while (found := orjson.loads(call(asker, "getJob", {"job": job}).body))["ended_us"] is None:
        time.sleep(_KEEP)
    files = (found["result"] or {}).get("files", [])
    if out is None and files and not asker.lasting:
        raise ConfigError("--out is needed: what this job makes is gone when the command has ended")
    for item in files if out is not None else ():
        name = one_segment(item["name"])  # an answer never says where in the file system it goes
        _write(Path(str(out)) / name, call(asker, "getJobFile", {"job": job, "name": name}).body)
    return answer._replace(body=orjson.dumps(found))


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
    for name, item in value.items():
        say(f"{printable(name)}: {printable(_cell(item))}")


def _page(items: list[Any]) -> None:
    if not items:
        say("nothing")
        return
    if not all(isinstance(item, dict) for item in items):
        for item in items:
            say(printable(_cell(item)))
        return
    names = list(items[0])[:_COLUMNS_MAX]
    table = make_table("", *names, left=len(names))
    for item in items:
        table.add_row(*(_cell(item.get(name)) for name in names))
    stdout().print(table, markup=False)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else orjson.dumps(value).decode()
