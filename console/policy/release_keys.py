"""`kvcustody policy key`, `trust`, `bundle` and `verify-bundle`: the signers of a policy, and signed policies."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvcustody.audit.tlog.signing_key import create_signing_key
from kvcustody.clock import SystemClock
from kvcustody.console.command import Json, print_json, say
from kvcustody.console.policy.release_options import (
    TRUST,
    At,
    Revision,
    TrustFile,
    read_public,
)
from kvcustody.console.policy.validate import EXIT_NO
from kvcustody.errors import ConfigError, PolicyError
from kvcustody.files import READABLE, write_file
from kvcustody.governance.release.trust import read_trust, write_trust
from kvcustody.governance.service.operations.parameter_groups import ParameterGroup, grouped
from kvcustody.plurals import several
from kvcustody.policies.bundle.bundle import verify

_Public = Annotated[list[Path], typer.Option(help="A public key's file; repeatable.")]
_Optional = Annotated[list[Path] | None, typer.Option(help="A public key's file; repeatable.")]
_Owners = Annotated[
    list[str] | None,
    typer.Option("--owner", help="TENANT=FILE: whose consent this key gives; repeatable."),
]


def add_to(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command(name="key", epilog=_KEY)(key_command)
    app.command(name="trust", epilog=_TRUST)(trust_command)
    app.command(name="bundle", epilog=_BUNDLE)(bundle_command)
    app.command(name="verify-bundle", epilog=_VERIFY)(verify_command)


_KEY = "Example:\n\n    kvcustody policy key ada.key --name ada"


def key_command(
    file: Annotated[Path, typer.Argument(help="The private key's new file.", metavar="FILE")],
    *,
    name: Annotated[str, typer.Option("--name", help="The key's owner, for the trust configuration.")],
    as_json: Json = False,
) -> None:
    """Make a key to sign policies with: FILE, of mode 0600, and FILE.pub to hand out. No file is overwritten."""
    public = file.with_name(file.name + ".pub")
    taken = f"public key `{public}` already exists; choose another path"
    if os.path.lexists(public):
        raise ConfigError(taken, path=public)
    key = create_signing_key(file, name)
    try:
        write_file(public, f"{key.verifier}\n".encode(), mode=READABLE, exclusive=True)
    except FileExistsError:
        raise ConfigError(taken, path=public) from None
    except OSError as error:
        raise ConfigError(f"public key `{public}`: {error.strerror}", path=public) from None
    if as_json:
        print_json({"name": name, "private": str(file), "public": str(public), "key": str(key.verifier)})
    else:
        say(f"created: {file} (keep it secret) and {public} (hand it out)")


_TRUST = (
    "Example:\n\n    kvcustody policy trust trust.toml --audience prod --author ada.key.pub --approver grace.key.pub "
    "--owner acme=acme.key.pub --break-glass brock.key.pub --orders control-plane.key.pub"
)


@dataclass(frozen=True, kw_only=True)
class TrustedKeys(ParameterGroup):
    """The keys whose signatures count."""

    author: _Public
    approver: _Public
    operator: _Optional = None
    owner: _Owners = None
    break_glass: _Optional = None
    orders: _Optional = None


@grouped
def trust_command(
    *,
    file: Annotated[Path, typer.Argument(help="The trust configuration's new file.", metavar="FILE")],
    audience: Annotated[str, typer.Option("--audience", help="The name of this deployment.")],
    public: TrustedKeys,
    hours: Annotated[int, typer.Option("--break-glass-hours", help="The longest duration of a break-glass act.")] = 4,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Also create this release folder, if it does not exist.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a trust configuration: whose signatures this deployment asks for. Workers and people keep a copy each."""
    keys: list[tuple[str, str, str | None]] = [
        (read_public(path), role, None)
        for role, paths in (
            ("author", public.author),
            ("approver", public.approver),
            ("operator", public.operator or []),
            ("break-glass", public.break_glass or []),
            ("orders", public.orders or []),
        )
        for path in paths
    ]
    for entry in public.owner or []:
        tenant, found, path = entry.partition("=")
        if not (tenant and found and path):
            raise ConfigError(f"`--owner {entry}` is not TENANT=FILE")
        keys.append((read_public(Path(path)), "owner", tenant))
    text = write_trust(audience, keys, hours)
    try:
        write_file(file, text.encode(), mode=READABLE, exclusive=True)
    except OSError as error:
        raise ConfigError(f"trust file `{file}`: {error.strerror}", path=file) from None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    if as_json:
        print_json({"path": str(file), "audience": audience, "keys": len(keys)})
    else:
        say(f"created: {file}, {several(len(keys), 'key')} for `{audience}`")


_BUNDLE = "Example:\n\n    kvcustody policy bundle 3 --out policy.bundle"


@grouped
def bundle_command(
    revision: Revision,
    *,
    out: Annotated[Path, typer.Option("--out", help="The file for the bundle.")] = Path("policy.bundle"),
    at: At,
) -> None:
    """Write an approved revision as one signed file, for workers that have no store to follow."""
    with at.desk() as desk:
        data = desk.bundle(revision)
    try:
        write_file(out, data, mode=READABLE)
    except OSError as error:
        raise ConfigError(f"bundle `{out}`: {error.strerror}", path=out) from None
    if at.as_json:
        print_json({"path": str(out), "revision": revision, "bytes": len(data)})
    else:
        say(f"written: {out}, revision {revision}, {len(data)} bytes")


_VERIFY = "Example:\n\n    kvcustody policy verify-bundle policy.bundle --trust trust.toml --at-least 3"


def verify_command(
    file: Annotated[Path, typer.Argument(help="A bundle.", metavar="FILE")],
    *,
    trust: TrustFile = TRUST,
    at_least: Annotated[int, typer.Option("--at-least", help="The lowest revision to accept.", min=0)] = 0,
    as_json: Json = False,
) -> None:
    """Whether a worker with this trust configuration would start with a bundle. Exit 0: it would; 1: it would not."""
    trusted = read_trust(trust)
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"bundle `{file}`: {error.strerror}", path=file) from None
    try:
        verified = verify(data, trusted, now_utc_us=SystemClock().utc_us(), revision_min=at_least)
    except PolicyError as error:
        if as_json:
            print_json({"accepted": False, "reason": error.message})
        else:
            say(f"refused: {error.message}")
        raise typer.Exit(EXIT_NO) from None
    manifest = verified.bundle.manifest
    if as_json:
        print_json({"accepted": True, "signers": list(verified.signers), "manifest": manifest.form()})
    else:
        say(f"accepted: {manifest.name}, revision {manifest.revision}, signed by {', '.join(verified.signers)}")
