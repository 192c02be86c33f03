"""`kvcustody report enrol-key` and `rotate-key`: which key signs reports, on record."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcustody.audit.tlog.signed_note import KeyKind, SigningKind
from kvcustody.audit.write.record_operator_act import recorder
from kvcustody.clock import SystemClock
from kvcustody.console.command import Json, print_json, say
from kvcustody.console.opening import writing
from kvcustody.console.options import DEFAULT, Ledger
from kvcustody.errors import ConfigError
from kvcustody.governance.keys.checkpoint_signing_key import recorded_keys
from kvcustody.governance.keys.report_signing_key import (
    open_report_key,
    recorded_report_keys,
    rotate_report_key,
)

_SigningKey = Annotated[Path, typer.Option(help="The file of the key that signs reports.", metavar="FILE")]
_Actor = Annotated[str, typer.Option(help="Who orders it: on record.")]


def enrol_key(
    *,
    signing_key: _SigningKey,
    actor: _Actor,
    ledger: Ledger = DEFAULT,
    kind: Annotated[SigningKind, typer.Option(help="The new key's kind, where the file does not exist.")] = "ed25519",
    as_json: Json = False,
) -> None:
    """Put the key that signs reports on record in the ledger; it is made where the file is not there.

    It signs nothing else. A report carries the leaf that names its key, with a proof under the log's own signature, so
    that auditors need no key but the log's. Sign the ledger afterwards (`kvcustody audit sign`) where no process does.
    """
    clock = SystemClock()
    with writing(ledger) as engine:
        periods = recorded_keys(engine)
        if not periods:
            raise ConfigError("no key signs this ledger's checkpoints; `kvcustody audit sign` creates one")
        if recorded_report_keys(engine):
            raise ConfigError("a key signs reports of this ledger already; `report rotate-key` hands over")
        with recorder(engine, clock) as writer:
            key = open_report_key(
                signing_key, periods[-1].key.name, engine, writer, clock, KeyKind.named(kind), actor=actor
            )
    _answer(str(key.verifier), as_json)


def rotate_key(
    *,
    signing_key: _SigningKey,
    actor: _Actor,
    ledger: Ledger = DEFAULT,
    kind: Annotated[SigningKind | None, typer.Option(help="The new key's kind. Without it, the old key's.")] = None,
    as_json: Json = False,
) -> None:
    """Hand over to a new key that signs reports: both sign the handover, the ledger records it, then the file changes.

    The old key may sign reports of checkpoints up to the newest signed one, and stays beside the new one under its id.
    """
    clock = SystemClock()
    with writing(ledger) as engine, recorder(engine, clock) as writer:
        named = None if kind is None else KeyKind.named(kind)
        key = rotate_report_key(signing_key, engine, writer, clock, actor, named)
    _answer(str(key.verifier), as_json)


def _answer(vkey: str, as_json: bool) -> None:
    if as_json:
        print_json({"key": vkey})
    else:
        say(f"signs reports: {vkey}")
