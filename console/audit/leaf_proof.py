"""The check of one leaf that was mailed with its proof (`kvcustody audit prove --out`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcustody.audit.tlog.proofs import ProofError
from kvcustody.audit.tlog.root_log import check_leaf, parse_leaf_proof
from kvcustody.audit.tlog.signed_note import NoteError, parse_vkey
from kvcustody.console.command import print_json
from kvcustody.errors import ConfigError

_NOT_SHOWN = (
    "what else the log holds, and that its head is the newest: this is one leaf",
    "what a key signed that yours handed over to: give the key of that time, or check an export",
)


def is_leaf_proof(path: Path) -> bool:
    """True for the proof of a leaf; what else is checked is a folder."""
    return path.suffix == ".proof" and path.is_file()


def check_leaf_proof(
    path: Path, keys: Sequence[str], witnesses: Sequence[str], threshold: int, *, as_json: bool
) -> bool:
    """Check NAME.leaf by NAME.proof and say what they show; whether they are sound."""
    facts: dict[str, Any] = {"sound": False, "problems": []}
    try:
        proof, leaf = parse_leaf_proof(path.read_bytes()), path.with_suffix(".leaf").read_bytes()
        seals = [parse_vkey(text) for text in witnesses]
        sealed = check_leaf(
            proof, leaf, [parse_vkey(text) for text in keys], witnesses=seals, witness_threshold=threshold
        )
    except OSError as problem:
        raise ConfigError(f"`{problem.filename}`: {problem.strerror}") from None
    except (NoteError, ProofError) as problem:
        facts["problems"].append(problem.message)
    else:
        head = sealed.signed.checkpoint
        lines = {line.key.name: line.at_seconds for line in sealed.signed.witnesses}
        facts |= {"sound": True, "log": sealed.name, "idx": proof.index, "size": sealed.head.size}
        facts |= {"origin": head.origin, "checkpoint": head.size, "witnesses": lines, "not_shown": _NOT_SHOWN}
    if as_json:
        print_json(facts)
    elif facts["sound"]:
        print(
            f"sound: leaf {proof.index} of {sealed.name} ({sealed.head.size} leaves), as `{head.origin}` signed it"
        )
        for line in _NOT_SHOWN:
            print(f"not shown: {line}")
    else:
        print(f"not sound: {facts['problems'][0]}")
    return bool(facts["sound"])
