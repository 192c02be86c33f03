"""Validate policy documents: return every problem as data, and the digest of each valid policy.

1. A document is sound exactly when `load_policy` accepts it and it compiles; nothing here repairs or guesses.
2. Reading a file never raises for what is in it; only a file that cannot be read is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvcustody.errors import PolicyError
from kvcustody.policies.document.digest import digest
from kvcustody.policies.document.model import Policy
from kvcustody.policies.document.problems import PolicyRejected, Problem
from kvcustody.policies.document.yaml_nodes import BYTES_MAX
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from kvcustody.policies.table.decision_table import DecisionTable


@dataclass(frozen=True, slots=True)
class Validation:
    """The result for one document: its policy and digest, or every reason for its rejection."""

    file: str
    policy: Policy | None
    digest: str | None
    problems: tuple[Problem, ...] = ()
    omitted: int = 0

    @property
    def sound(self) -> bool:
        """Whether the document had no problem at all."""
        return self.digest is not None


def validate(text: str | bytes, *, name: str) -> Validation:
    """Load and compile a document; problems refer to it as `name`."""
    try:
        policy = load_policy(text, name=name)
    except PolicyRejected as rejected:
        return Validation(name, None, None, rejected.problems, rejected.omitted)
    compile_policy(policy, revision=1)
    return Validation(name, policy, digest(policy))


def read_source(path: Path) -> bytes:
    """Return a document's bytes, at most one more than allowed. Raises `PolicyError` if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(BYTES_MAX + 1)
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise PolicyError(f"policy `{path}` cannot be read: {reason}", path=path) from error


def load_file(path: Path) -> Policy:
    """Return the policy in a file. Raises `PolicyRejected`, or `PolicyError` if it cannot be read."""
    return load_policy(read_source(path), name=str(path))


def load_table(path: Path, *, revision: int = 1, revoked: frozenset[str] = frozenset()) -> DecisionTable:
    """Return the decision table of the policy in a file. Raises as `load_file` does."""
    return compile_policy(load_file(path), revision=revision, revoked=revoked)
