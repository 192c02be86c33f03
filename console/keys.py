"""`kvcustody keys`: the root key file under which every tenant's secrets are wrapped."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcustody.clock import SystemClock
from kvcustody.console.command import Json, print_json
from kvcustody.errors import KeyringError
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.locked_buffer import KEY_BYTES
from kvcustody.governance.keys.root_key_wrapping import RootKeyWrapping, create_root_key, read_root_key
from kvcustody.governance.keys.wrapped_key_store import FileKeyStore

DEFAULT = Path("kvcustody-root.key")
_File = Annotated[Path, typer.Argument(help="The root key file.", metavar="FILE")]

app = typer.Typer(
    no_args_is_help=True,
    help="Make and check the root key file: 32 random bytes, mode 0600, on a local disk.",
    epilog="docs/operate/keys.md says which keys exist, where each one lives and how it ends.",
)


@app.command(
    epilog="Examples:\n\n    kvcustody keys init\n\n    kvcustody keys init /etc/kvcustody/root.key --json"
)
def init(file: _File = DEFAULT, *, as_json: Json = False) -> None:
    """Create a root key: 32 random bytes in a new file of mode 0600. An existing file is never touched.

    Every tenant's secrets are wrapped by it: whoever reads it can open them, and without it nothing that was
    cached or sealed under it can be found or read again. Keep a copy where only an operator can reach it, and
    give workers the file with KVCUSTODY_ROOT_KEY_SOURCE=file and KVCUSTODY_ROOT_KEY_PATH.
    """
    if not file.parent.is_dir():
        raise KeyringError(f"root key `{file}`: no such folder; create it, closed to others", path=file)
    create_root_key(file)
    _show(file, as_json, "created")


@app.command(
    epilog="Examples:\n\n    kvcustody keys check\n\n    kvcustody keys check /etc/kvcustody/root.key --json"
)
def check(file: _File = DEFAULT, *, as_json: Json = False) -> None:
    """Check a root key file as a worker would: regular file, owner, mode, size. The key is never shown."""
    _show(file, as_json, "usable")


@app.command(
    epilog="Examples:\n\n    kvcustody keys init new.key\n\n"
    "    kvcustody keys rewrap kvcustody-keys.json --from kvcustody-root.key --to new.key"
)
def rewrap(
    store: Annotated[
        Path, typer.Argument(help="The store of wrapped epoch secrets (`keyring_path`).", metavar="STORE")
    ],
    old: Annotated[Path, typer.Option("--from", help="The root key file they are wrapped by now.")],
    new: Annotated[Path, typer.Option("--to", help="The root key file that wraps them from now on.")],
    *,
    as_json: Json = False,
) -> None:
    """Move every epoch secret under another root key, in one durable save; then the old key may be destroyed.

    Stop the workers first: one that runs on holds the old key, and cannot open the store again.
    """
    if not store.is_file():
        raise KeyringError(f"key store `{store}`: no such file", path=store)
    ports = [RootKeyWrapping(read_root_key(file)) for file in (old, new)]
    keyring = Keyring(FileKeyStore(store), ports[0], SystemClock())
    try:
        moved = len(keyring.rewrap(ports[1]))
    finally:
        keyring.close()
    if as_json:
        print_json({"path": str(store), "status": "rewrapped", "epochs": moved})
    else:
        print(f"rewrapped: {moved} epochs of {store} are under {new}; {old} opens none of them")


def _show(file: Path, as_json: bool, status: str) -> None:
    """What may be known of a key: where it is, and the public half of its signing key."""
    public = RootKeyWrapping(read_root_key(file)).verification_key().hex()
    if as_json:
        print_json({"path": str(file), "status": status, "bytes": KEY_BYTES, "verification_key": public})
    else:
        print(f"{status}: {file} ({KEY_BYTES} bytes, closed to others); verification key {public}")
