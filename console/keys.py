"""`kvcustody keys`: the root key file that wraps every secret, and the hierarchy of keys below it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, cast

import typer

from kvcustody.clock import SystemClock
from kvcustody.console.api.group import OperationGroup
from kvcustody.console.command import Json, make_table, print_json, progress_bar, say, stdout
from kvcustody.errors import ConfigError, KeyringError
from kvcustody.extensions import KEY_WRAPPING, PREFIX, load
from kvcustody.files import private_folder, write_file
from kvcustody.governance.keys.key_backups import KeyBackups
from kvcustody.governance.keys.key_hierarchy import (
    BUCKET_ENDS,
    EPOCH_ENDS,
    EPOCH_WHEN,
    SUBJECT_ENDS,
    SUBJECT_WHEN,
    KeyHierarchy,
    read_hierarchy,
)
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.locked_buffer import KEY_BYTES
from kvcustody.governance.keys.root_key_wrapping import (
    RootKeyWrapping,
    WrappingPort,
    create_root_key,
    read_root_key,
)
from kvcustody.governance.keys.shred_keys import rewrap_shred_keys, whole_file
from kvcustody.governance.keys.wrapped_key_store import FileKeyStore
from kvcustody.governance.settings import load_settings
from kvcustody.plurals import several
from kvcustody.times import DAY_US, iso, readable

DEFAULT = Path("kvcustody-root.key")
_File = Annotated[Path, typer.Argument(help="The root key file.", metavar="FILE")]

app = typer.Typer(
    cls=OperationGroup,
    no_args_is_help=True,
    help="Make and check the root key file: 32 random bytes, mode 0600, on a local disk.",
    epilog="docs/concepts/keys.md lists the keys, their places and how each one ends.",
)

KeyringFile = Annotated[
    Path | None,
    typer.Option("--keyring", help="The store of wrapped epoch secrets; that of the settings if left out."),
]
ShredKeysFile = Annotated[
    Path | None,
    typer.Option("--shred-keys", help="The file of shred keys; that of the settings if left out."),
]


@app.command(epilog="Examples:\n\n    kvcustody keys init\n\n    kvcustody keys init /etc/kvcustody/root.key --json")
def init(file: _File = DEFAULT, *, as_json: Json = False) -> None:
    """Create a root key: 32 random bytes in a new file of mode 0600. An existing file is never touched.

    Every tenant's secrets are wrapped by it: whoever reads it can open them, and without it nothing that was
    cached or sealed under it can be found or read again. Keep a copy where only an operator can reach it, and
    give workers the file with KVCUSTODY_ROOT_KEY_SOURCE=file and KVCUSTODY_ROOT_KEY_PATH.
    """
    if not file.parent.is_dir():
        raise KeyringError(f"root key `{file}`: no such folder; create it, without access for others", path=file)
    create_root_key(file)
    _show(file, as_json, "created")


@app.command(epilog="Examples:\n\n    kvcustody keys check\n\n    kvcustody keys check /etc/kvcustody/root.key --json")
def check(file: _File = DEFAULT, *, as_json: Json = False) -> None:
    """Check a root key file as a worker would: regular file, owner, mode, size. The key is never shown."""
    _show(file, as_json, "usable")


@app.command(
    epilog="Examples:\n\n    kvcustody keys init new.key\n\n"
    "    kvcustody keys rewrap kvcustody-keys.json --from kvcustody-root.key --to new.key\n\n"
    "    kvcustody keys rewrap kvcustody-keys.json --from kvcustody-root.key --to root.wrapped "
    "--to-service kvcustody-key-service.yaml --shred-keys kvcustody-shred.keys --end-old"
)
def rewrap(
    store: Annotated[
        Path, typer.Argument(help="The store of wrapped epoch secrets (`keyring_path`).", metavar="STORE")
    ],
    old: Annotated[Path, typer.Option("--from", help="The root key file, or wrapped root key, that wraps them now.")],
    new: Annotated[
        Path,
        typer.Option(
            "--to",
            help="The root key file that wraps them from now on; with --to-service it is made where it is absent.",
        ),
    ],
    shred: Annotated[
        Path | None,
        typer.Option("--shred-keys", help="Where workers have tiers: their file of shred keys, moved first."),
    ] = None,
    old_service: Annotated[
        Path | None,
        typer.Option("--from-service", help="Where a key service wraps them now: the document that names it."),
    ] = None,
    new_service: Annotated[
        Path | None,
        typer.Option("--to-service", help="Where a key service wraps them from now on: the document that names it."),
    ] = None,
    end_old: Annotated[
        bool,
        typer.Option(
            "--end-old",
            help="Then destroy the old root key, and a key service's old keys; earlier backups become unreadable.",
        ),
    ] = False,
    *,
    as_json: Json = False,
) -> None:
    """Move every epoch secret under another root key or key service; then the old key may be destroyed.

    Stop the workers first: one that runs on holds the old key, and cannot open the store again. Shred keys that are
    left behind are lost with the old key, and with them every copy in every tier: give their file too. A call that was
    cut short is made again, and goes on.
    """
    if not store.is_file():
        raise KeyringError(f"key store `{store}`: no such file", path=store)
    if end_old and shred is None and load_settings().shred_keys_path.exists():
        raise ConfigError(
            f"shred keys `{load_settings().shred_keys_path}` would be lost with the old root key; give --shred-keys"
        )
    ports = _port(old, old_service), _port(new, new_service)
    backups = [KeyBackups(path) for path in ((store, shred) if shred else (store,))]
    old_root = ports[0].verification_key()
    for each in backups:
        each.moved(SystemClock().utc_us(), old_root)
    shreds = 0 if shred is None else rewrap_shred_keys(shred, *ports)
    keyring = Keyring(FileKeyStore(store), ports[0], SystemClock())
    try:
        with progress_bar() as bar:
            task = bar.add_task("rewrapping epochs", total=None)
            moved = len(keyring.rewrap(ports[1], lambda done, of: bar.update(task, completed=done, total=of)))
        pending_us = _end_old(keyring, ports[0]) if end_old else 0
        if end_old and not pending_us:
            for each in backups:
                each.end(old_root)
    finally:
        keyring.close()
    pending = iso(pending_us) if pending_us else None
    if as_json:
        counts = {"epochs": moved, "shred_keys": shreds}
        print_json(
            {
                "path": str(store),
                "status": "rewrapped",
                **counts,
                "old_ended": end_old,
                "old_pending_until": pending,
            }
        )
        return
    what = f"{several(moved, 'epoch')} of {store}" + (f" and {several(shreds, 'key')} of {shred}" if shred else "")
    say(f"rewrapped: {what} are under {new}; {old} opens none of them")
    if end_old:
        say(f"the old keys are {f'destroyed by their service at {pending}' if pending else 'destroyed'}")


def _port(root: Path, service: Path | None) -> WrappingPort:
    if service is None:
        return RootKeyWrapping(read_root_key(root), root)
    named = load_settings().model_copy(update={"key_service_path": service, "root_key_path": root})
    return cast(WrappingPort, load(KEY_WRAPPING, f"{PREFIX}key-service").make(WrappingPort, named))


def _end_old(keyring: Keyring, port: WrappingPort) -> int:
    """Destroy what wrapped the keyring's epochs before; return when the last of it ends (UTC µs), or 0 if it has
    ended.
    """
    until_us = 0
    if port.ends_under:
        for owner in keyring.owners():
            for epoch in keyring.epochs(owner):
                until_us = max(until_us, port.end_epoch(owner, epoch).until_us)
    return max(until_us, port.destroy().until_us)


@app.command(
    epilog="Examples:\n\n    kvcustody keys backup --days 30\n\n"
    "    kvcustody keys backup --days 30 --to /backup/kvcustody-2026-12-01"
)
def backup(
    days: Annotated[int, typer.Option("--days", min=1, max=3650, help="Maximum age of the backup in days.")],
    to: Annotated[
        Path | None,
        typer.Option(
            "--to",
            help="A new folder for copies of both files; without it a backup by other means is told of.",
        ),
    ] = None,
    keyring: KeyringFile = None,
    shred: ShredKeysFile = None,
    *,
    as_json: Json = False,
) -> None:
    """Tell of a backup of the files of keys, and until when it is kept; with --to make it.

    Until its date, or until `keys rewrap --end-old`, no erasure of what those keys open is complete, and no order to
    destroy them. Tell of each snapshot and each volume's backup too: one that nobody told of is not known.
    """
    settings = load_settings()
    store = keyring or settings.keyring_path
    reads = {store: Path.read_bytes, shred or settings.shred_keys_path: whole_file}
    files = {path: read for path, read in reads.items() if path.exists()}
    if not files:
        raise KeyringError("there is no key file to back up; name one", path=keyring)
    now_us = SystemClock().utc_us()
    until_us = now_us + days * DAY_US
    try:
        with FileKeyStore(store).exclusive() if store in files else nullcontext():  # else no epoch can end
            for path in files:
                KeyBackups(path).add(now_us, until_us)
            if to is not None:
                private_folder(to)
                for path, read in files.items():
                    write_file(to / path.name, read(path), exclusive=True)
    except OSError as error:
        raise KeyringError(f"backup `{to}`: cannot be written ({error.strerror})", path=to) from None
    names = [str(path) for path in files]
    if as_json:
        print_json({"files": names, "until": iso(until_us), "folder": None if to is None else str(to)})
    else:
        say(f"backup of {' and '.join(names)}{'' if to is None else f' in {to}'}, kept until {iso(until_us)}")


@app.command(
    epilog="Examples:\n\n    kvcustody keys tree\n\n"
    "    kvcustody keys tree --keyring kvcustody-keys.json --shred-keys kvcustody-shred.keys --json"
)
def tree(
    keyring: KeyringFile = None,
    shred: ShredKeysFile = None,
    last: Annotated[int, typer.Option("--last", min=0, help="How many destroyed keys to show, the newest first.")] = 10,
    *,
    as_json: Json = False,
) -> None:
    """Show the hierarchy of keys: which there are, what each ends and when, and which were destroyed when.

    No secret is opened and no person named: subjects are counted, and have random ids in the JSON document. The root
    key is not needed. Keys of buckets that are over and still there are told: a worker with a tier destroys them.
    """
    settings = load_settings()
    paths = keyring or settings.keyring_path, shred or settings.shred_keys_path
    for path, said in zip(paths, (keyring, shred), strict=True):
        if said is not None and not path.exists():
            raise KeyringError(f"keys `{path}`: no such file", path=path)
    found = read_hierarchy(*paths, SystemClock().utc_us())
    if as_json:
        print_json({"keyring": str(paths[0]), "shred_keys": str(paths[1]), **found.data()})
    else:
        _show_tree(found, last)


def _show(file: Path, as_json: bool, status: str) -> None:
    """Print the public facts about a key: its place, and its signing key's public half."""
    public = RootKeyWrapping(read_root_key(file)).verification_key().hex()
    if as_json:
        print_json({"path": str(file), "status": status, "bytes": KEY_BYTES, "verification_key": public})
    else:
        say(f"{status}: {file} ({KEY_BYTES} bytes, closed to others); verification key {public}")


def _show_tree(hierarchy: KeyHierarchy, last: int) -> None:
    out = stdout()
    say("root key: wraps every secret below; without it none of them can be opened")
    table = make_table("epoch secrets", "owner", "epoch", "made", "ends", "when", left=5)
    for key in hierarchy.epochs:
        state = f"{key.epoch}, current" if key.is_current else str(key.epoch)
        table.add_row(str(key.owner), state, readable(key.created_us), EPOCH_ENDS, EPOCH_WHEN)
    out.print(table)
    table = make_table("shred keys", "of", "keys", "made", "ends", "when", left=5)
    if hierarchy.subjects:
        made = [key.created_us for key in hierarchy.subjects]
        since = f"{readable(min(made))} to {readable(max(made))}"
        table.add_row("subjects", str(len(made)), since, SUBJECT_ENDS, SUBJECT_WHEN)
    for bucket in hierarchy.buckets:
        when = f"{readable(bucket.until_us)}{', overdue' if bucket in hierarchy.overdue else ''}"
        table.add_row(f"bucket of {bucket.label}", "1", readable(bucket.created_us), BUCKET_ENDS, when)
    out.print(table)
    _show_destroyed(hierarchy, last)
    if hierarchy.overdue:
        say(
            f"expired, but with an existing key: {several(len(hierarchy.overdue), 'bucket')}: "
            "start a worker with these tiers"
        )


def _show_destroyed(found: KeyHierarchy, last: int) -> None:
    rows = [(key.destroyed_us, str(key.owner), f"epoch {key.epoch}", "") for key in found.destroyed_epochs]
    for gone in found.destroyed:
        of = f"bucket of {gone.label}" if gone.kind == "bucket" else gone.kind
        due = readable(gone.until_us, none="")
        rows.append((gone.destroyed_us, of, gone.id.hex(), due))
    table = make_table("destroyed", "when", "of", "key", "was due", left=4)
    for at_us, *said in sorted(rows, reverse=True)[:last]:
        table.add_row(readable(at_us), *said)
    out = stdout()
    out.print(table)
    if len(rows) > last:
        say(f"{len(rows) - last} more; --last {len(rows)} shows every one")
