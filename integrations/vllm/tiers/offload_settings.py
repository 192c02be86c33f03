"""Where a governed vLLM keeps copies: `offload` in the connector's `kv_connector_extra_config`.

    {"offload": {"host_bytes": "8GiB", "nvme_path": "/var/lib/kvcustody/tier", "nvme_bytes": "200GiB"}}

1. Without it, or with no bytes, nothing leaves the device. Which classification may go where is the policy's `offload`.
2. What cannot work is refused at start by name: a failed load that ends its request, layers of several kinds, another
   connector beside ours, workers on several machines.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError, model_validator

from kvcustody.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OFFLOAD = "offload"
_ONE_MACHINE = (None, "mp", "uni")


class OffloadSettings(BaseModel):
    """Sizes are those of each worker: with four tensor-parallel workers, four times as much in all."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host_bytes: ByteSize = Field(ByteSize(0), ge=0, description="Host memory for sealed copies.")
    nvme_path: Path | None = Field(None, description="Folder for sealed copies, ours alone.")
    nvme_bytes: ByteSize = Field(ByteSize(0), ge=0, description="Most bytes of files in `nvme_path`.")
    nvme_seconds: float = Field(
        0.5, gt=0.0, le=60.0, description="How long a file is waited for before it is a miss."
    )
    object_blocks: int = Field(16, ge=1, le=1024, description="Most blocks in one sealed object.")
    staging_bytes: ByteSize = Field(
        ByteSize(64 << 20), ge=0, description="Locked memory for plaintext on its way to a seal."
    )
    shred_keys_path: Path = Field(
        Path("kvcustody-shred.keys"),
        description="The file of shred keys; a relative path begins at the keyring's folder.",
    )

    @model_validator(mode="after")
    def _folder_with_its_size(self) -> OffloadSettings:
        if (self.nvme_path is None) != (not self.nvme_bytes):
            raise ValueError("nvme_path: a folder and `nvme_bytes` belong together")
        return self

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tiers that there are, in the order in which they are asked."""
        named = (("host", self.host_bytes > 0), ("nvme", self.nvme_path is not None))
        return tuple(name for name, is_there in named if is_there)


def read_offload(extra: dict[str, Any]) -> OffloadSettings | None:
    """What a connector's extra configuration says of tiers; None where nothing is kept. Raises `ConfigError`."""
    given = extra.get(OFFLOAD)
    if given is None:
        return None
    try:
        settings = OffloadSettings.model_validate(given)
    except ValidationError as error:
        problems = "; ".join(
            f"`{OFFLOAD}.{'.'.join(map(str, one['loc']))}`: {one['msg']}"
            for one in error.errors(include_input=False, include_url=False)
        )
        raise ConfigError(f"kv_connector_extra_config: {problems}", problems=problems) from None
    return settings if settings.tiers else None


def refuse_offload(config: VllmConfig, groups: list[str], *, has_others: bool) -> None:
    """Raises `ConfigError` for an engine whose blocks cannot leave it under custody (rule 2).

    groups: the managers of its layer groups, by name; has_others: another connector runs beside ours.
    """
    transfer = config.kv_transfer_config
    policy = getattr(transfer, "kv_load_failure_policy", None)
    if policy != "recompute":
        raise ConfigError(
            f"`{OFFLOAD}`: `kv_load_failure_policy` is `{policy}`, so a copy that does not open would end its request; "
            'set it to `recompute` in `--kv-transfer-config` ("kv_load_failure_policy": "recompute")'
        )
    if has_others:
        raise ConfigError(
            f"`{OFFLOAD}`: beside another connector vllm loads from one and saves to all; remove the other, or "
            f"`{OFFLOAD}`"
        )
    if len(groups) != 1 or groups[0] != "FullAttentionManager":
        raise ConfigError(
            f"`{OFFLOAD}`: this model's layers are managed by `{'`, `'.join(groups)}`; only full attention in one "
            f"group is offloaded yet; start it without `{OFFLOAD}`"
        )
    backend = config.parallel_config.distributed_executor_backend
    if backend not in _ONE_MACHINE or getattr(config.parallel_config, "nnodes", 1) > 1:
        raise ConfigError(
            f"`{OFFLOAD}`: workers of `{backend}` may be on other machines, which do not share the keyring's files; "
            f"use `--distributed-executor-backend mp` on one machine, or start without `{OFFLOAD}`"
        )
