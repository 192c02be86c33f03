"""The key that signs the ledger's checkpoints, and timestamps from third parties.

`kvcustody audit sign`, `keys`, `rotate-key` (the next key), `confirm-break` (what was signed is lost) and `timestamp`
(an RFC 3161 authority).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.signed_note import KeyKind, SigningKind, parse_vkey
from kvcustody.audit.tlog.witness.rfc3161_timestamp import TimestampAuthority, stamp
from kvcustody.audit.write.record_operator_act import recorder
from kvcustody.clock import SystemClock
from kvcustody.console.command import Json, make_table, print_dated, print_json, say, stdout
from kvcustody.console.opening import key_texts, reading, writing
from kvcustody.console.options import DEFAULT, Ledger
from kvcustody.errors import ConfigError
from kvcustody.governance.keys.checkpoint_signing_key import (
    confirm_break,
    memory_of,
    open_signing_key,
    recorded_keys,
    rotate_signing_key,
    sign_ledger,
)
from kvcustody.governance.settings import load_settings
from kvcustody.plurals import several
from kvcustody.times import readable


def sign(
    signing_key: Annotated[
        Path | None,
        typer.Option(
            help="The file of the key that signs this ledger; without it, that of the settings.",
        ),
    ] = None,
    ledger: Ledger = DEFAULT,
    *,
    as_json: Json = False,
) -> None:
    """Sign the newest checkpoint now: for a ledger that no service or engine has open, as they sign every second.

    What was recorded while nobody signed can then be proved, exported and reported. A ledger without a key gets one, on
    record. Nothing is signed that contradicts what the key signed before.
    """
    settings = load_settings()
    path, kind = signing_key or settings.signing_key_file, KeyKind.named(settings.signing_key_kind)
    with writing(ledger) as engine:
        note = sign_ledger(path, settings.ledger_origin, engine, SystemClock(), kind)
        periods = recorded_keys(engine)
    if note is None:
        raise ConfigError(f"another key signs this ledger (`{periods[-1].key}`), and `{path}` is not there")
    if as_json:
        print_dated({"size": note.size, "signed_us": note.at_us, "key": str(periods[-1].key)})
    else:
        say(f"signed: {note.size} root leaves, at {readable(note.at_us)} UTC, by {periods[-1].key}")


def rotate(
    signing_key: Annotated[Path, typer.Option(help="The file of the key that signs this ledger now.")],
    actor: Annotated[str, typer.Option(help="Who does it, for the record.")],
    ledger: Ledger = DEFAULT,
    kind: Annotated[
        SigningKind | None,
        typer.Option(help="The new key's kind: `ml-dsa-44` is post-quantum. Without it, the old key's."),
    ] = None,
    *,
    as_json: Json = False,
) -> None:
    """Hand over to a new signing key: both sign the handover, the ledger records it, then the file changes.

    Stop the process that signs first (the service, or the engine); it signs with the new key from its next start on.
    The old key stays beside the new one, under its id: its checkpoints verify as before, and it may sign nothing newer.
    Give auditors the new public key. Whoever trusts the old one checks the handover with `audit keys --key OLD`.
    A handover that cannot be recorded does not happen.
    """
    clock = SystemClock()
    with writing(ledger) as engine:
        periods = recorded_keys(engine)
        if not periods:
            raise ConfigError("no signing key is on record in this ledger; the service creates one at its start")
        with recorder(engine, clock) as writer:
            old = open_signing_key(signing_key, periods[-1].key.name, engine, writer, clock)
            if old is None:
                raise ConfigError(f"`{signing_key}` does not exist; give the file of key `{periods[-1].key}`")
            memory = memory_of(signing_key)
            signer = CheckpointSigner(engine, [old], memory=memory, clock=clock)
            new = rotate_signing_key(
                signing_key, signer, writer, clock, actor, None if kind is None else KeyKind.named(kind)
            )
            size = signer.last_head().size
        CheckpointSigner(engine, [new], memory=memory, clock=clock).sign_once()
    kept = signing_key.with_name(f"{signing_key.name}.{old.verifier.key_id.hex()}")
    if as_json:
        print_json({"old": str(old.verifier), "new": str(new.verifier), "size": size, "kept": str(kept)})
        return
    say(f"signs from now on: {new.verifier}")
    say(f"signed up to {size} root leaves: {old.verifier} (kept as {kept})")


def confirm(
    signing_key: Annotated[Path, typer.Option(help="The file of the key that signs this ledger.")],
    actor: Annotated[str, typer.Option(help="Who does it, for the record.")],
    reason: Annotated[str, typer.Option(help="Why the ledger lost signed content, for the record.")],
    ledger: Ledger = DEFAULT,
    *,
    as_json: Json = False,
) -> None:
    """Go on signing a ledger that lost what was signed (a failover, a restore): the key states the break, on record.

    Have workers hand in again first what they kept: `kvcustody_worker_ledger_spilled_bytes` is 0 then. Stop the process
    that signs. The break stays: who holds the lost checkpoint sees that this ledger does not extend it, `audit fsck`
    shows the statement, and a witness that cosigned it cosigns nothing more of this log.
    """
    clock = SystemClock()
    with writing(ledger) as engine:
        periods = recorded_keys(engine)
        if not periods:
            raise ConfigError("no signing key is on record in this ledger")
        with recorder(engine, clock) as writer:
            key = open_signing_key(signing_key, periods[-1].key.name, engine, writer, clock)
            if key is None:
                raise ConfigError(f"`{signing_key}` does not exist; give the file of key `{periods[-1].key}`")
            signer = CheckpointSigner(engine, [key], memory=memory_of(signing_key), clock=clock)
            what = confirm_break(signer, key, engine, writer, clock, actor, reason)
        signer.sign_once()
    if as_json:
        sizes = {"lost": what.lost.size, "found": what.found.size, "base": what.base.size}
        print_json(sizes | {"replayed": what.replayed})
        return
    say(f"lost: a signed checkpoint of {what.lost.size} root leaves; the ledger had {what.found.size}")
    say(f"signs on from {several(what.base.size, 'root leaf')}; {several(what.replayed, 'leaf')} replayed since")


def keys(
    ledger: Ledger = DEFAULT,
    key: Annotated[
        str | None,
        typer.Option(help="A public key that you trust, or its file: the chain has to begin there."),
    ] = None,
    *,
    as_json: Json = False,
) -> None:
    """Show every key that signs or signed this ledger, and the sizes it may sign; each handover is verified."""
    with reading(ledger) as engine:
        periods = recorded_keys(engine)
    if key is not None:
        trusted = parse_vkey(key_texts([key])[0])
        places = [number for number, period in enumerate(periods) if period.key == trusted]
        if not places:
            raise ConfigError(f"no handover of this ledger begins at key `{trusted}`")
        periods = periods[places[0] :]
    if as_json:
        rows = [{"key": str(signer), "first_size": first, "last_size": last} for signer, first, last in periods]
        print_json({"keys": rows})
        return
    table = make_table(f"{len(periods)} signing keys", "key", "from size", "to size", left=1)
    for period in periods:
        last = "-" if period.last_size is None else str(period.last_size)
        table.add_row(str(period.key), str(period.first_size), last)
    stdout().print(table, markup=False)


def timestamp(
    url: Annotated[str, typer.Option(help="Where the authority answers timestamp queries.")],
    certificate: Annotated[Path, typer.Option(help="The authority's own certificate (PEM).")],
    roots: Annotated[Path, typer.Option(help="The roots that it must lead to (PEM).")],
    name: Annotated[str, typer.Option(help="The authority's name in the ledger.")] = "tsa",
    ledger: Ledger = DEFAULT,
    *,
    as_json: Json = False,
) -> None:
    """Have the newest signed checkpoint stamped, check the token, and keep it beside the ledger.

    It shows that the checkpoint existed by then. It is no witness: it does not look for forks.
    """
    authority = TimestampAuthority.load(name, url, certificate, roots)
    with writing(ledger) as engine:
        size, at_us = stamp(engine, authority)
    if as_json:
        print_dated({"checkpoint": size, "authority": name, "at_us": at_us})
    else:
        say(f"checkpoint {size} existed at {readable(at_us)} UTC, says {name}")
