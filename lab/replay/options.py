"""The options of a replay; importable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvcustody.audit.tlog.signed_note import DEFAULT_ORIGIN, SigningKind
from kvcustody.errors import ConfigError
from kvcustody.policies import library
from kvcustody.policies.document.model import Policy
from kvcustody.policies.reading.load_policy import load_policy


@dataclass(frozen=True, slots=True)
class EnvironmentOptions:
    """Where and under which policy a replay runs.

    `signing_key` is the file of the key that signs the ledger; without it, one beside the ledger, for it alone.
    `host_tier_bytes`: evicted blocks go there, sealed, but for those of the strictest classification; whether one is
    brought back is decided as if computing took what `recompute_tokens_per_second` says: the replay computes nothing.
    """

    policy: str = "regulated-saas"
    pool_blocks: int = 8192
    block_tokens: int = 16
    device: str = "cpu"
    database: Path = Path("kvcustody.db")
    signing_key: Path | None = None
    signing_key_kind: SigningKind = "ed25519"
    ledger_origin: str = DEFAULT_ORIGIN
    host_tier_bytes: int = 0
    recompute_tokens_per_second: float = 20_000.0

    @property
    def signing_key_file(self) -> Path:
        """The path of the key that signs checkpoints."""
        return self.signing_key or self.database.with_name(self.database.name + ".signing.key")


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """The speed and rates of a replay. Shares are shares of requests."""

    seed: int = 1
    abort_share: float = 0.02
    checked_share: float = 0.25
    samples: int = 160


def read_policy(name: str) -> Policy:
    """Read a library policy by its name, or a policy file.

    Raises:
        PolicyError: the policy is invalid.
        ConfigError: it cannot be read.
    """
    if name in library.names():
        return library.load(name)
    path = Path(name)
    try:
        text = path.read_bytes()
    except OSError as error:
        known = ", ".join(library.names())
        reason = error.strerror or error
        raise ConfigError(f"cannot read policy `{name}`: {reason}; the library has {known}", path=name) from None
    return load_policy(text, name=path.name)
