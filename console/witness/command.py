"""`kvcustody witness`: signs, for the logs that it trusts, that they only grew.

Run it where the log's operator cannot reach it: on another machine, under another account, and if possible in another
company.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from kvcustody.audit.tlog.signed_note import KeyKind, parse_vkey
from kvcustody.audit.tlog.signing_key import create_signing_key, read_signing_key
from kvcustody.audit.tlog.witness.cosign import Witness
from kvcustody.audit.tlog.witness.server import WitnessServer
from kvcustody.audit.tlog.witness.state import WitnessError, WitnessMemory
from kvcustody.console.command import Json, print_json, say
from kvcustody.plurals import several

KEY, MEMORY, SOCKET = "witness.key", "witness.db", "witness.sock"
_Folder = Annotated[Path, typer.Argument(help="The witness's own folder: its key, and what it has seen.")]
_Logs = Annotated[list[str], typer.Option("--log", help="A log's public key (`name+id+base64`); may be given again.")]

app = typer.Typer(
    no_args_is_help=True,
    help="Run a witness (C2SP tlog-witness): a third party that signs that a ledger only grew.",
    epilog="Without a witness, split views and removed leaves stay undetected by anyone who stored no head.",
)


@app.command(
    epilog="Example: `kvcustody witness init /var/lib/kvcustody-witness --name witness.example.org --log LEDGER_VKEY`"
)
def init(
    folder: _Folder,
    name: Annotated[str, typer.Option(help="The witness's name in its signatures, as a domain name.")],
    log: _Logs = [],  # noqa: B006 - typer reads it
    ml_dsa: Annotated[bool, typer.Option("--ml-dsa", help="Sign with ML-DSA-44 instead of Ed25519.")] = False,
    *,
    as_json: Json = False,
) -> None:
    """Make a witness: its key, its memory, and the logs that it trusts. Prints its public key."""
    keys = [parse_vkey(text) for text in log]
    if not folder.parent.is_dir():
        raise WitnessError(f"`{folder.parent}` is not a folder; create it first", path=folder)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as problem:
        raise WitnessError(f"`{folder}` cannot be made: {problem.strerror}", path=folder) from None
    made = create_signing_key(folder / KEY, name, KeyKind.ML_DSA_44 if ml_dsa else KeyKind.COSIGNATURE)
    WitnessMemory(folder / MEMORY, create=True).trust(keys)
    _show(folder, str(made.verifier), as_json)


@app.command(epilog="Example: `kvcustody witness trust /var/lib/kvcustody-witness --log LEDGER_VKEY`")
def trust(folder: _Folder, log: _Logs, *, as_json: Json = False) -> None:
    """Trust more logs, or a further key of one that is trusted (after a rotation)."""
    WitnessMemory(folder / MEMORY).trust([parse_vkey(text) for text in log])
    _show(folder, str(read_signing_key(folder / KEY).verifier), as_json)


@app.command(epilog="Example: `kvcustody witness status /var/lib/kvcustody-witness --json`")
def status(folder: _Folder, *, as_json: Json = False) -> None:
    """Show the witness's public key, and the newest head that it signed of each log."""
    _show(folder, str(read_signing_key(folder / KEY).verifier), as_json)


@app.command(
    epilog="Examples:\n\n    kvcustody witness serve /var/lib/kvcustody-witness\n\n"
    "    kvcustody witness serve /var/lib/kvcustody-witness --listen 127.0.0.1:8720"
)
def serve(
    folder: _Folder,
    listen: Annotated[
        str | None, typer.Option(help="`host:port` or `unix:/path` (default: a Unix socket in the folder).")
    ] = None,
) -> None:
    """Answer `POST /add-checkpoint` until Ctrl-C. Put TLS in front of it where it is reached over a network."""
    witness = Witness(read_signing_key(folder / KEY), WitnessMemory(folder / MEMORY), lambda: int(time.time()))
    server = WitnessServer(witness, listen or f"unix:{folder.resolve() / SOCKET}")
    say(f"witness {witness.key.name} at {server.address}", flush=True)
    try:
        server.serve()
    finally:
        server.release()


def _show(folder: Path, vkey: str, as_json: bool) -> None:
    heads = WitnessMemory(folder / MEMORY).heads()
    if as_json:
        logs = {origin: {"size": head.size, "root": head.root.hex()} for origin, head in heads.items()}
        print_json({"folder": str(folder), "vkey": vkey, "logs": logs})
        return
    say(vkey)
    for origin, head in heads.items():
        say(f"{origin}: {several(head.size, 'leaf')}, root {head.root.hex()}")
