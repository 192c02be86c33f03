"""`kvcustody policy segment add`: declare a prompt prefix, by a keyed digest of its whole blocks.

1. The text and its token ids go into the digest and nowhere else: not on the screen, not into the policy, no log.
2. Nothing takes effect here: the policy with the segment is validated, proved, approved and activated as any other.
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from kvcustody.clock import SystemClock
from kvcustody.console.command import Json, print_json, say
from kvcustody.console.policy.init_fmt_schema import Write, policy_text, replace_file
from kvcustody.console.policy.validate import File
from kvcustody.errors import ConfigError, IdentityError
from kvcustody.governance.decisions.segment_matcher import DeclaredSegment, declare
from kvcustody.governance.identity.domain_spec import tenant_owner
from kvcustody.governance.identity.model_identity import DIGEST_BYTES, ModelIdentity
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.wrapped_key_store import FileKeyStore
from kvcustody.governance.service.operations.parameter_groups import ParameterGroup, grouped
from kvcustody.governance.settings import load_settings
from kvcustody.governance.worker.plugins import open_root_key
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.workbench.add_segment import Entry, add_segment
from kvcustody.tenants import SEPARATOR

_FILE_BYTES_MAX = 64 << 20

app = typer.Typer(
    no_args_is_help=True,
    help="Declare prompt prefixes that several tenants, or all subjects of one, may share.",
    epilog="docs/reference/policy-language.md#segments says what a segment opens.",
)
_EPILOG = (
    "Examples:\n\n    kvcustody policy segment add policy.yaml --id support-agent --owner acme --to acme-labs"
    " -c internal --until 2027-03-31 --issuer apikey --text system-prompt.txt --tokenizer tokenizer.json"
    " --model model.json --write\n\n"
    "    kvcustody policy segment add policy.yaml --id house --owner acme -c public --issuer apikey"
    " --tokens ids.json --model 5f0c… --block-tokens 16"
)
Id = Annotated[str, typer.Option("--id", help="The segment's id: decisions, revocations and reports name it.")]
Owner = Annotated[str, typer.Option(help="The tenant whose blocks they are, and under whose key the digest is.")]
To = Annotated[list[str] | None, typer.Option("--to", help="A tenant that may match it besides the owner; repeatable.")]
All = Annotated[bool, typer.Option("--to-all", help="Every admitted tenant may match it.")]
Level = Annotated[str, typer.Option("--classification", "-c", help="The segment's own classification.")]
Until = Annotated[str | None, typer.Option(help="Its end, as 2027-03-31; needed where it reaches beyond its owner.")]
Issuer = Annotated[
    str,
    typer.Option(
        help="Who vouches for the owner's name, as the identity document says (docs/how-to/operate/set-up-identity.md)."
    ),
]
Text = Annotated[Path | None, typer.Option("--text", help="The text as prompts begin with it, template applied.")]
Tokenizer = Annotated[Path | None, typer.Option(help="The model's `tokenizer.json`; goes with --text.")]
Special = Annotated[
    bool,
    typer.Option("--special-tokens", help="The tokenizer adds its special tokens, as the engine's does."),
]
Ids = Annotated[
    Path | None,
    typer.Option("--tokens", help="Instead of a text: a JSON list of token ids, as the engine sees them."),
]
Model = Annotated[
    str,
    typer.Option(help="The model identity: 64 hex digits, or a JSON file with its fields (docs/concepts/keys.md)."),
]
BlockTokens = Annotated[
    int | None,
    typer.Option("--block-tokens", min=1, help="Tokens in a block; with a file, the file says it."),
]


def add_to(parent: typer.Typer) -> None:
    """Add this module's commands."""
    parent.add_typer(app, name="segment")


@app.callback()
def _group() -> None:
    """Keep `add` a command of its own in the group."""


@dataclass(frozen=True, kw_only=True)
class SegmentOptions(ParameterGroup):
    """The segment's entry in the policy."""

    id_: Id
    owner: Owner
    classification: Level
    issuer: Issuer
    model: Model
    to: To = None
    to_all: All = False
    until: Until = None


@dataclass(frozen=True, kw_only=True)
class PrefixOptions(ParameterGroup):
    """The prefix to declare, and how it becomes token ids."""

    text: Text = None
    tokenizer: Tokenizer = None
    special_tokens: Special = False
    tokens: Ids = None
    block_tokens: BlockTokens = None


@app.command(name="add", epilog=_EPILOG)
@grouped
def add_command(
    *,
    file: File,
    segment: SegmentOptions,
    prefix: PrefixOptions,
    write: Write = False,
    as_json: Json = False,
) -> None:
    """Declare a segment: make the keyed digest of a prompt prefix and add it to a policy. The text is never shown.

    Covers the whole blocks that end at least 8 tokens before the text does, because a tokenizer may merge across its
    end. Uses the root key and keyring of the settings (KVCUSTODY_ROOT_KEY_PATH, KVCUSTODY_KEYRING_PATH), the ones that
    the workers use. Prints the entry; --write puts it into the file, which is then reviewed and released as usual.
    """
    source = policy_text(file)
    policy = load_policy(source, name=str(file))
    policy_tenants = {tenant.id for tenant in policy.tenants}
    id_of_owner, _, said = segment.owner.partition(SEPARATOR)
    if said not in ("", segment.issuer):
        raise ConfigError(f"`--issuer {segment.issuer}` is not that of owner `{segment.owner}`", owner=segment.owner)
    if policy.named(segment.owner) not in policy_tenants:
        raise ConfigError(f"tenant `{segment.owner}` is not in policy `{file}`; name one that is", owner=segment.owner)
    if segment.to_all and segment.to:
        raise ConfigError("give `--to` or `--to-all`, not both")
    ids = _token_ids(prefix.text, prefix.tokenizer, prefix.tokens, special=prefix.special_tokens)
    digest, size = _model(segment.model, prefix.block_tokens)
    declared = _declare(segment.issuer, id_of_owner, ids, digest, size)
    readers: object = "*" if segment.to_all else list(dict.fromkeys([segment.owner, *(segment.to or ())]))
    entry: Entry = {
        "id": segment.id_,
        "owner": segment.owner,
        "tenants": readers,
        "digest": f"hmac:{declared.digest}",
    }
    entry |= {"tokens": declared.tokens, "classification": segment.classification}
    entry |= {} if segment.until is None else {"expires": segment.until}
    result = add_segment(source, entry, name=str(file))
    if write:
        replace_file(file, result)
    _show(file, entry, declared, size, write=write, as_json=as_json)


def _declare(issuer: str, owner: str, ids: NDArray[np.int64], model: bytes, block_tokens: int) -> DeclaredSegment:
    """Return the digest under the owner's current key epoch; a tenant without one gets its first."""
    settings = load_settings()
    if settings.root_key_source == "generated":
        settings = settings.model_copy(update={"root_key_source": "file"})  # never made here
    port = open_root_key(settings)
    with closing(Keyring(FileKeyStore(settings.keyring_path), port, SystemClock())) as keyring:
        key_owner = tenant_owner(issuer, owner)
        keyring.ensure([key_owner])
        return declare(keyring, key_owner, ids, model=model, block_tokens=block_tokens)


def _token_ids(text: Path | None, tokenizer: Path | None, tokens: Path | None, *, special: bool) -> NDArray[np.int64]:
    """Return token ids from a text and its tokenizer, or from a list.

    Raises:
        ConfigError: the input is wrong; the message omits the content.
    """
    if (text is None) == (tokens is None) or (text is None) != (tokenizer is None):
        raise ConfigError("give `--text` with `--tokenizer`, or `--tokens`")
    ids: Any = json_of(tokens) if tokens is not None else _tokenized(text, tokenizer, special)
    if not isinstance(ids, list) or not all(type(id_) is int and 0 <= id_ < 1 << 31 for id_ in ids):
        raise ConfigError(f"file `{tokens}` is not a JSON list of token ids; write it as [1, 2, 3]", path=tokens)
    return np.array(ids, dtype=np.int64)


def _tokenized(text: Path | None, tokenizer: Path | None, special: bool) -> list[int]:
    try:
        from tokenizers import Tokenizer as Fast
    except ImportError as error:
        raise ConfigError(
            "`--text` needs the package tokenizers; install it, or give the ids with `--tokens`"
        ) from error
    assert text is not None and tokenizer is not None
    content = _content(text)
    try:
        fast = Fast.from_file(str(tokenizer))
    except Exception as error:  # the package raises plain Exceptions
        raise ConfigError(f"file `{tokenizer}` is not a tokenizer.json", path=tokenizer) from error
    return list(fast.encode(content, add_special_tokens=special).ids)


def _content(path: Path) -> str:
    try:
        if path.stat().st_size > _FILE_BYTES_MAX:
            raise ConfigError(f"file `{path}` has more than {_FILE_BYTES_MAX:,} bytes", path=path)
        return path.read_bytes().decode()  # as it is: a changed line end is another text
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"file `{path}` cannot be read: {type(error).__name__}", path=path) from None


def json_of(path: Path) -> Any:
    """Return a file's JSON; an error names the file but none of its content."""
    try:
        return json.loads(_content(path))
    except (ValueError, RecursionError):
        raise ConfigError(f"file `{path}` is not JSON", path=path) from None


def _model(model: str, block_tokens: int | None) -> tuple[bytes, int]:
    """Return (digest, tokens per block) of a model identity, given as hex digits or as a file with its fields."""
    if len(model) == 2 * DIGEST_BYTES and set(model) <= set("0123456789abcdef"):
        if block_tokens is None:
            raise ConfigError("`--block-tokens` is missing; it goes with a model's digest")
        return bytes.fromhex(model), block_tokens
    fields = json_of(Path(model))
    try:
        identity = ModelIdentity(**fields)
    except (TypeError, IdentityError) as error:
        raise ConfigError(f"file `{model}` is not a model identity: {error}", path=model) from error
    if block_tokens not in (None, identity.block_tokens):
        message = f"`--block-tokens` is `{block_tokens}`, but the model's blocks have `{identity.block_tokens}`"
        raise ConfigError(message, block_tokens=block_tokens)
    return identity.digest, identity.block_tokens


def _show(
    file: Path, entry: Entry, declared: DeclaredSegment, block_tokens: int, *, write: bool, as_json: bool
) -> None:
    covered = declared.blocks * block_tokens
    if as_json:
        facts = {"file": str(file), "written": write, "blocks": declared.blocks, "covered_tokens": covered}
        print_json({**facts, "key_epoch": declared.epoch, "segment": entry})
        return
    if not write:
        readers = entry["tenants"] if isinstance(entry["tenants"], list) else '"*"'
        shown = entry | {"tenants": f"[{', '.join(readers)}]" if isinstance(readers, list) else readers}
        say("\n".join(f"{'  - ' if key == 'id' else '    '}{key}: {value}" for key, value in shown.items()))
    say(f"covers {covered} of {declared.tokens} tokens, {declared.blocks} blocks, under key epoch {declared.epoch}")
    say(f"{'written: ' + str(file) if write else 'not written: add --write'}; next: kvcustody policy validate {file}")
