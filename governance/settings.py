"""Every setting of a worker, with its default and meaning; a test compares docs/reference/settings.md with this file.

A setting comes from, strongest first: an explicit argument, the environment (`KVCUSTODY_` and the name in capitals),
the file named by `KVCUSTODY_CONFIG` (TOML or YAML), the default.

1. An unknown name in the file or among the arguments is an error, with the setting that it is close to.
2. A variable of the environment that is close to a setting is misspelt, and refused with the setting's name.
3. The worker's log reports any other unknown variable, which is then ignored. Orchestrators invent variables from the
   names of services. Those that Kubernetes and container links make are never taken for a setting.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ByteSize, Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from kvcustody.audit.evidence.subjects.subject_key_store import SubjectKeys, open_subject_keys
from kvcustody.audit.leaf.batch import UNKNOWN_WORKER
from kvcustody.audit.store.database.database_place import SqliteFile, checked_setting, database_place
from kvcustody.audit.tlog.root_sealer import INTERVAL_SECONDS
from kvcustody.audit.tlog.signed_note import DEFAULT_ORIGIN, SigningKind, check_name
from kvcustody.clock import Clock
from kvcustody.deadline_clock import DeadlineClock, open_deadline_clock
from kvcustody.errors import ConfigError, CustodyError
from kvcustody.governance.identity.principal import check_identifier
from kvcustody.governance.keys.root_key_wrapping import ROOT_KEY_VARIABLE
from kvcustody.http_exchange import host_and_port
from kvcustody.policies.document.model import NAME_PATTERN
from kvcustody.policies.document.problems import PolicyRejected
from kvcustody.policies.document.yaml_document import YamlValues, document_problems, read_values

PREFIX = "KVCUSTODY_"
SERVICE_PREFIX = "KVCUSTODY_SERVICE_"  # settings of the control plane's own process
CONFIG_VARIABLE = "KVCUSTODY_CONFIG"
CONTROL_PLANE = "control-plane"  # `policy_release`: the one that `control_plane` serves
_FILE_BYTES_MAX = 1 << 20
_DAY_SECONDS = 86_400
_READ_ELSEWHERE = frozenset(  # by commands and this project's own tests
    PREFIX + name
    for name in (
        "API_KEY_FILE",
        "COMPLETE",
        "FILES_GROUP_READS",
        "RECORD",
        "SCHEMA_EXAMPLES",
        "SCREENSHOTS",
        "SERVER",
        "SERVER_CA",
        "TEST_DEVICE",
        "TRACES",
        "WRITE_GOLDEN",
    )
) | {CONFIG_VARIABLE, ROOT_KEY_VARIABLE, SERVICE_PREFIX + "CONFIG", SERVICE_PREFIX + "KILLS"}
_OF_AN_ORCHESTRATOR = re.compile(
    r"(_SERVICE_HOST|_SERVICE_PORT(_[A-Z0-9_]+)?|_PORT(_[0-9]+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?)?)$"
)
_CLOSE = 0.85  # of the letters, in order: one letter wrong, missing or too many in a name of seven

Share = Annotated[float, Field(ge=0.0, le=1.0)]


class LayeredSettings(BaseSettings):
    """Settings from arguments and environment; their loader reads the file."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Use arguments and environment only, never a `.env` file."""
        return init_settings, env_settings


class Settings(LayeredSettings):
    """The settings of one worker, checked; build it with `load_settings`."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True, validate_default=True)

    worker_name: str = Field("worker-0", description="Name of this worker in the ledger; one per running process.")
    profile: Literal["shared", "strict", "dedicated"] = Field(
        "shared",
        description="Isolation profile that this deployment promises. A policy with another profile is refused.",
    )
    policy_path: Path = Field(
        Path("policies/library/regulated-saas.yaml"),
        description="The policy document to compile and activate.",
    )
    policy_trust: str = Field(
        "",
        description="The trust configuration (docs/how-to/policy/release-a-policy.md). With it, `policy_path` must "
        "name a signed bundle. Empty: `policy_path` is a plain document.",
    )
    policy_release: str = Field(
        "",
        description="Where released revisions come from: a release folder, `ledger` for the ledger's database, or "
        "`control-plane`; needs `policy_trust`. Empty: nothing changes while the worker runs.",
    )
    order_key_path: Path | None = Field(
        None,
        description="The key that signs this process's orders, or `plugin:NAME`. `policy_trust` must list it with "
        "the role `orders` (docs/how-to/operate/sign-orders.md). Empty: with `policy_trust` set, this "
        "process writes no orders (KVC615).",
    )
    monitoring: Literal["refused", "allowed"] = Field(
        "refused",
        description="Whether this worker follows orders to enforce the policy for some requests only and to monitor "
        "the others (docs/how-to/operate/adopt.md). Refused in the strict profile.",
    )
    policy_lease_seconds: int = Field(
        60,
        ge=1,
        le=86_400,
        description="Seconds without contact to `policy_release` after which requests reuse only their own scope.",
    )
    custody_lease_seconds: int = Field(
        0,
        ge=0,
        le=86_400,
        description="Seconds without erasure news from the control plane after which nothing is reused. Each worker "
        "and door varies it by up to a fifth. 0: `erasure.within` of the policy at the start, at least "
        "300. A door has no policy.",
    )
    policy_mark_path: Path = Field(
        Path("kvcustody-policy.mark"),
        description=(
            "File with the newest policy revision that this worker has run, so that it accepts "
            "nothing older after a restart."
        ),
    )
    clock_path: Path = Field(
        Path("kvcustody-clock.json"),
        description="File with the latest time seen on this machine, so that neither a clock step nor a restart "
        "revives what has ended. The machine's processes share it. A relative path starts at the "
        "keyring's folder.",
    )
    clock_jump_seconds_max: int = Field(
        3600,
        ge=1,
        le=86_400,
        description="Seconds that the wall clock may run ahead of the boot clock since boot. Beyond that no grant "
        "is opened until `kvcustody clock confirm`.",
    )
    clock_away_days_max: int = Field(
        30,
        ge=1,
        le=3650,
        description="Seconds that the clock may advance while the machine is off, before the same applies.",
    )
    database_url: str = Field(
        "sqlite:///kvcustody.db",
        repr=False,
        description="The ledger: an SQLite file or a PostgreSQL server, as an SQLAlchemy URL. Not used with "
        "`control_plane`.",
    )
    control_plane: str = Field(
        "",
        description="The control plane that keeps the ledger and distributes erasures: `https://HOST:PORT`, "
        "`http://127.0.0.1:PORT` or `unix:PATH`. Empty: the ledger is `database_url` "
        "(docs/how-to/operate/connect-workers.md).",
    )
    control_plane_key_path: Path | None = Field(
        None,
        description="File of this worker's API key, mode 0600. The key's principal must be named `worker_name`. "
        "Required with `control_plane`.",
    )
    control_plane_ca_path: Path | None = Field(
        None,
        description="PEM file of the authorities that may sign the control plane's certificate; default: the system's.",
    )
    control_plane_certificate_path: Path | None = Field(
        None,
        description=(
            "PEM file of this worker's client certificate, for a control plane that requires one "
            "in addition to the key."
        ),
    )
    control_plane_certificate_key_path: Path | None = Field(
        None, description="PEM file of the client certificate's key, mode 0600."
    )
    subject_keys_url: str | None = Field(
        None,
        repr=False,
        description="URL of the store of subject keys, separate from the ledger (an SQLite file or a PostgreSQL "
        "server). Destroying a key unlinks a subject in every backup of the ledger too. Default for a "
        "SQLite ledger: `NAME-subjects.db` next to it, mode 0600. Required for a ledger on a server.",
    )
    subject_names: Literal["sealed", "clear"] = Field(
        "sealed",
        description="`sealed`: the ledger holds no subject names. `clear`: without a store of subject keys, the "
        "ledger and all its backups hold names.",
    )
    witnesses_path: Path | None = Field(
        None,
        description="File of witnesses that receive checkpoints, one line `URL VKEY` each. Without witnesses, split "
        "views and truncated tails of the ledger stay undetected.",
    )
    spill_path: Path = Field(
        Path("kvcustody.spill"),
        description="Folder for events that cannot reach the ledger at the moment. It must be on a local disk.",
    )
    spill_bytes_max: ByteSize = Field(
        ByteSize(2 << 30),
        description="Size at which the spill is full and admission stops. In the strict and dedicated profiles half "
        "of it is divided among tenants. It is compressed and lasts more than a day at 50 requests a "
        "second.",
    )
    kept_bytes_max: ByteSize = Field(
        ByteSize(1 << 30),
        description="Bytes of acknowledged batches that a worker keeps in `spill_path` until a signed checkpoint "
        "covers them. Beyond it the oldest are deleted. Normally it is some seconds of batches.",
    )
    ledger_keys_path: Path | None = Field(
        None,
        description="File of the ledger's public keys, one a line as `kvcustody audit keys` prints them. Only "
        "checkpoints signed by one of them release what a worker keeps. Default: any signed checkpoint "
        "does.",
    )
    replay_share: float = Field(
        0.5,
        gt=0.0,
        le=1.0,
        description="Largest share of time for sending the spill. Live batches go first.",
    )
    ledger_batch_ms: int = Field(
        250,
        ge=1,
        le=10_000,
        description="Milliseconds that events wait to be committed together. An event that must be on record before "
        "its action never waits.",
    )
    root_key_source: str = Field(
        "generated",
        pattern=r"^(file|environment|generated|key-service|plugin:.+)$",
        description="Where the root key comes from: an existing `file`, the variable `KVCUSTODY_ROOT_KEY` "
        "(`environment`, refused in strict), a file made at first start (`generated`), a `key-service` whose keys wrap "
        "every epoch (docs/how-to/storage/key-services.md), or an extension that holds it: `plugin:NAME` "
        "(docs/build/extending.md).",
    )
    root_key_path: Path = Field(
        Path("kvcustody-root.key"),
        description="The root key file: 32 bytes, mode 0600. With a key service: the local root key, wrapped by it.",
    )
    key_service_path: Path = Field(
        Path("kvcustody-key-service.yaml"),
        description="The document that names the key service (`root_key_source: key-service`).",
    )
    keyring_path: Path = Field(Path("kvcustody-keys.json"), description="The store of wrapped epoch secrets.")
    identity_path: Path = Field(
        Path("kvcustody-identity.yaml"),
        description="The identity document: API keys, issuers, claims and served paths "
        "(docs/how-to/operate/set-up-identity.md).",
    )
    signing_key_path: Path = Field(
        Path("kvcustody-signing.key"),
        description="The key that signs the ledger's checkpoints and nothing else, mode 0600. It is created at "
        "first start if the ledger has none. A relative path starts at the keyring's folder.",
    )
    signing_key_kind: SigningKind = Field(
        "ed25519",
        description="Type of key to create for a ledger that has none: `ed25519`, or `ml-dsa-44` (post-quantum, "
        "where `cryptography` offers it). Change an existing key with `kvcustody audit rotate-key "
        "--kind`.",
    )
    ledger_origin: str = Field(
        DEFAULT_ORIGIN,
        description="Name of the ledger in its checkpoints (C2SP origin), for example `example.com/kvcustody`. It "
        "is fixed once the key exists. The default adds the ledger's identity, so that every name is "
        "unique.",
    )
    checkpoint_seconds: float = Field(
        1.0,
        gt=0.0,
        le=3600.0,
        description="Seconds between signed checkpoints. Commits never wait for one.",
    )
    root_interval_seconds: float = Field(
        INTERVAL_SECONDS,
        gt=0.0,
        le=3600.0,
        description="Seconds within which a process seals committed leaves under a checkpoint, or sooner if a proof "
        "is requested. Leaves unsealed for three times as long are overdue.",
    )
    scope_token_key_path: Path = Field(
        Path("kvcustody-scope.key"),
        description="The secret for scope tokens, shared by API server and engine: 32 bytes, mode 0600, created at "
        "first start. It must not be the root key's file.",
    )
    scope_token_seconds: int = Field(
        60,
        ge=1,
        le=3600,
        description="Seconds that a scope token stays valid on its way from the API server to the engine.",
    )
    scope_tokens_remembered_max: int = Field(
        131_072,
        ge=4,
        description="Maximum number of valid scope tokens that an engine remembers as spent, a quarter of them for "
        "one tenant. Beyond it requests reuse nothing.",
    )
    placement_group: str = Field(
        "default",
        pattern=f"^{NAME_PATTERN}$",
        description="Placement group of this worker. It refuses requests that the policy's `placement` reserves for "
        "other groups (docs/how-to/fleet/run-a-door.md). `doors` of its identity document must name the "
        "same group.",
    )
    handover_address: str = Field(
        "",
        description="`HOST:PORT` at which the workers of `handover_peers_path` fetch what this worker prefilled. "
        "Each further shard uses the next port. Empty: no hand-overs (docs/how-to/storage/hand-over.md).",
    )
    handover_peers_path: Path | None = Field(
        None,
        description=(
            "File of the workers that hand over to each other, with names, addresses and public keys. Empty: none."
        ),
    )
    handover_key_path: Path = Field(
        Path("kvcustody-handover.key"),
        description="This worker's key for hand-overs, created at first start in the keyring's folder.",
    )
    handover_certificate_path: Path | None = Field(
        None,
        description="PEM file of this worker's certificate for hand-overs over TLS. Empty: names, sizes and tickets "
        "are sent unencrypted.",
    )
    handover_certificate_key_path: Path | None = Field(
        None, description="PEM file of that certificate's key, mode 0600."
    )
    handover_ca_path: Path | None = Field(
        None, description="PEM file of the authority that signed the certificates of all these workers."
    )
    handover_lease_seconds: int = Field(30, ge=1, le=600, description="How long an offered hand-over can be fetched.")
    windowed_token_seconds: int = Field(
        0,
        ge=0,
        le=86_400,
        description="Seconds that the salt of requests through a front end without a door stays the same, at least "
        "60 (docs/how-to/fleet/run-a-door.md). Doors and workers need the same value. 0: such requests "
        "are refused.",
    )
    namespace_days: int = Field(
        30,
        ge=0,
        le=3650,
        description="Days after which a requester's name for routers changes, if no control plane sets it. Doors "
        "and workers need the same value. 0: never.",
    )
    request_bytes_max: ByteSize = Field(
        ByteSize(32 << 20), description="Largest request body that the middleware reads. Larger ones get 413."
    )
    block_tokens: int = Field(16, ge=1, le=1024, description="Tokens per block.")
    clean_reserve_share: Share = Field(
        0.02,
        description="Share of the pool that background scrubbing keeps clean in advance.",
    )
    scrub_batch_blocks: int = Field(
        4096, ge=1, description="Maximum number of blocks overwritten in one kernel launch."
    )
    scrub_tuning_path: Path = Field(
        Path("kvcustody-scrub-tuning.json"),
        description="File with the fastest measured way to scrub on each device. Not used without a GPU.",
    )
    eviction_policy: str = Field(
        "policy",
        pattern=r"^(policy|plugin:.+)$",
        description="What decides the order of eviction: the policy document's `eviction` (`policy`), or an "
        "extension (`plugin:NAME`).",
    )
    tiers: str = Field(
        "",
        description="Extensions that keep copies of blocks off the device, separated by commas: `plugin:NAME`. "
        "Erasures and scans include each of them.",
    )
    host_tier_bytes: ByteSize = Field(
        ByteSize(0),
        description="Host memory for sealed copies of evicted blocks, for example `8GiB`. 0: no host tier "
        "(docs/concepts/tiers.md).",
    )
    nvme_tier_path: Path | None = Field(
        None,
        description="Folder on a local disk for sealed copies of evicted blocks, used by this worker only. Its "
        "copies are found again after a restart. Empty: no NVMe tier.",
    )
    nvme_tier_bytes: ByteSize = Field(
        ByteSize(0), description="Capacity of the folder `nvme_tier_path`, for example `200GiB`."
    )
    remote_tier_url: str = Field(
        "",
        description="Remote store for sealed copies: `s3://BUCKET/PREFIX`, `valkeys://HOST:PORT/DATABASE/PREFIX` or "
        "`mooncake://MASTER:PORT/PREFIX`. Workers with the same address share it. Empty: no remote tier "
        "(docs/how-to/storage/remote-store.md).",
    )
    remote_tier_bytes: ByteSize = Field(
        ByteSize(0), description="Capacity of this worker's share of the remote store, for example `2TiB`."
    )
    remote_tier_endpoint: str | None = Field(
        None,
        description="Address of an S3-compatible store, for example `https://s3.example`; empty: AWS. Plain HTTP is "
        "allowed for loopback only. For Mooncake: the HTTP address of its master.",
    )
    remote_tier_region: str = Field(
        "us-east-1",
        pattern=r"^[a-z0-9-]{1,64}$",
        description="Region in the signatures of S3 requests.",
    )
    remote_tier_secret_path: Path | None = Field(
        None,
        description="File with the credentials, mode 0600: for S3 a key's id and secret on one line, for Valkey the "
        "password. Empty: the environment's credentials (S3), or no password.",
    )
    remote_tier_labels: str = Field(
        "",
        pattern=r"^[^\s=,]+=[^\s=,]+(, *[^\s=,]+=[^\s=,]+)*$|^$",
        description="Labels of the remote store, for example `region=eu, purpose=chat, purpose=files`. Only domains "
        "with matching labels are stored there, as the policy's `match` demands.",
    )
    remote_tier_heir_of: str = Field(
        "",
        description="Names of workers that died for good, separated by commas. This worker takes over their copies "
        "in the remote store, as the policy's `on_worker_death` says "
        "(docs/how-to/storage/remote-store.md).",
    )
    remote_tier_timeout_ms: int = Field(
        1_000,
        ge=1,
        le=60_000,
        description="Timeout for one object of the remote store, in milliseconds. A timeout is a miss.",
    )
    remote_tier_in_flight: int = Field(
        8, ge=1, le=64, description="Maximum number of concurrent transfers to and from the remote store."
    )
    shred_keys_path: Path = Field(
        Path("kvcustody-shred.keys"),
        description=(
            "File of shred keys, mode 0600, outside every tier. Destroying a shred key ends the copies sealed under it."
        ),
    )
    tier_object_blocks: int = Field(
        16, ge=1, le=1024, description="Maximum number of blocks sealed into one object of a tier."
    )
    tier_staging_buffers: int = Field(
        2,
        ge=1,
        le=64,
        description=(
            "Number of memory-locked buffers, one object each, through which plaintext passes to and from tiers."
        ),
    )
    tier_timeout_ms: int = Field(
        250,
        ge=1,
        le=60_000,
        description="Timeout for one object of a disk tier, in milliseconds. A timeout is a miss.",
    )
    scope_salts_path: Path | None = Field(
        None,
        description="File through which governed engines tell a cache layer on the same machine who owns each salt, "
        "mode 0600 (docs/reference/engines/lmcache.md). Empty: they tell it nothing.",
    )
    tier_transfers: Literal["measured", "always"] = Field(
        "measured",
        description="When to move copies: if it is expected to be faster than computing (`measured`), or whenever "
        "policy permits (`always`).",
    )
    sweep_batch_residencies: int = Field(
        128,
        ge=1,
        le=1_000_000,
        description=(
            "Maximum number of residencies that expire in one step. 128 take less than a millisecond on one core."
        ),
    )
    fence_bound_ms: int = Field(
        5000,
        ge=1,
        description="Milliseconds that a released block may wait for device work before it is quarantined.",
    )
    residencies_per_tenant_max: int = Field(
        100_000,
        ge=1,
        description="Maximum number of residencies of one tenant. Beyond it the oldest expires.",
    )
    scan_online: bool = Field(
        True,
        description="Whether every engine step scans a slice of the pool for orphans "
        "(docs/how-to/audit/find-orphans.md).",
    )
    erasure_poll_ms: int = Field(
        250,
        ge=10,
        description="Milliseconds between checks of the ledger for erasures that others requested.",
    )
    vllm_connectors_allowed: str = Field(
        "",
        description="vLLM KV connectors that may run next to kvcustody's, separated by commas: "
        "`NAME=RECORD#DIGEST`, with the record of a passed conformance run and its digest.",
    )
    kv_events_endpoint: str = Field(
        "",
        description=(
            "Address that publishes KV events, for example `tcp://127.0.0.1:5557`. Empty: they are not published."
        ),
    )
    kv_events_replay_endpoint: str = Field(
        "", description="Address that replays missed KV events, for example `tcp://127.0.0.1:5558`. Empty: no replay."
    )
    kv_events_format: Literal["vllm", "sglang", "dynamo", "mooncake"] = Field(
        "vllm", description="The engine or indexer whose KV event format is published."
    )
    kv_events_tokens: Literal["withheld", "published"] = Field(
        "withheld", description="Whether KV events contain token ids and callers' salts."
    )
    kv_events_remote: bool = Field(
        False,
        description="Allow KV events at an address that other machines can reach. They are not authenticated.",
    )
    nats: str = Field(
        "",
        description="The fleet's NATS server, for example `nats://127.0.0.1:4222` or `tls://HOST:4222`. Workers "
        "publish KV events there, and workers and doors receive hints of erase epochs. Empty: none.",
    )
    nats_credentials_path: Path = Field(
        Path("kvcustody-nats.creds"),
        description="Credentials for that server, read again for each connection.",
    )
    nats_ca_path: Path | None = Field(
        None, description="PEM file of the authority that signed its certificate; empty: the system's."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest log level that is written."
    )
    log_format: Literal["json", "console"] = Field(
        "console", description="Log format: one JSON object a line, or text for people."
    )

    @field_validator("handover_address")
    @classmethod
    def _handover_address(cls, value: str) -> str:
        if value:
            host_and_port(value)
        return value

    @field_validator("worker_name")
    @classmethod
    def _worker_name(cls, value: str) -> str:
        if value.lower() == UNKNOWN_WORKER:
            raise ValueError(f"`{value}` is reserved for unnamed processes: choose another name")
        try:
            return check_identifier("worker name", value)
        except Exception as error:
            raise ValueError(getattr(error, "message", "malformed")) from None

    @field_validator("ledger_origin")
    @classmethod
    def _ledger_origin(cls, value: str) -> str:
        try:
            check_name(value)
        except CustodyError as error:
            raise ValueError(error.message) from None
        return value

    @field_validator("database_url", "subject_keys_url")
    @classmethod
    def _database_url(cls, value: str | None) -> str | None:
        return checked_setting(value)

    @model_validator(mode="after")
    def _strict(self) -> Settings:
        if self.profile == "strict" and self.root_key_source == "environment":
            raise ValueError("root_key_source: `environment` is refused in the strict profile; use a 0600 file")
        if self.monitoring == "allowed" and self.profile != "shared":
            raise ValueError(f"monitoring: `allowed` is refused in the {self.profile} profile")
        return self

    @model_validator(mode="after")
    def _trusted_release(self) -> Settings:
        if self.policy_release and not self.policy_trust:
            raise ValueError("policy_release: needs `policy_trust`, which says whose signatures count")
        return self

    @model_validator(mode="after")
    def _names_of_subjects(self) -> Settings:
        if self.subject_names == "clear" and self.subject_keys_url is not None:
            raise ValueError("subject_names: `clear` is for a ledger without `subject_keys_url`")
        return self

    @model_validator(mode="after")
    def _behind_control_plane(self) -> Settings:
        files = ("key_path", "ca_path", "certificate_path", "certificate_key_path")
        given = [name for name in files if getattr(self, f"control_plane_{name}") is not None]
        if not self.control_plane:
            if given:
                raise ValueError(f"control_plane_{given[0]}: needs `control_plane`")
            if self.policy_release == CONTROL_PLANE:
                raise ValueError("policy_release: `control-plane` needs the setting `control_plane`")
            if self.nats:
                raise ValueError("nats: needs `control_plane`, whose erase epochs make its subjects")
            return self
        if self.control_plane_key_path is None:
            raise ValueError("control_plane_key_path: is needed with `control_plane`")
        if ("certificate_path" in given) != ("certificate_key_path" in given):
            raise ValueError("control_plane_certificate_path: set certificate and key together")
        if self.policy_release == "ledger":
            raise ValueError("policy_release: the ledger is behind the control plane; use `control-plane`")
        for name in ("witnesses_path", "subject_keys_url", "subject_names"):
            if name in self.model_fields_set and getattr(self, name) is not None:
                raise ValueError(f"{name}: belongs to the process that keeps the ledger, the control plane")
        return self

    @model_validator(mode="after")
    def _handed_over(self) -> Settings:
        if self.handover_address and self.handover_peers_path is None:
            raise ValueError("handover_address: needs `handover_peers_path`, which says who may fetch")
        tls = (self.handover_certificate_path, self.handover_certificate_key_path, self.handover_ca_path)
        if None in tls and tls != (None, None, None):
            raise ValueError("handover_certificate_path: set certificate, key and authority together")
        return self

    @model_validator(mode="after")
    def _separate_keys(self) -> Settings:
        if self.signing_key_file in (self.root_key_path, self.scope_token_key_path, self.keyring_path):
            raise ValueError(
                "signing_key_path: is the file of another key; checkpoints are signed by a key of their own"
            )
        if self.scope_token_key_path == self.root_key_path:
            raise ValueError("scope_token_key_path: is the root key's file; the API server must not hold the root key")
        return self

    @property
    def publishes_kv_events(self) -> bool:
        """Whether block events are published."""
        return bool(self.kv_events_endpoint or self.nats)

    @property
    def strict(self) -> bool:
        """Whether the strict rules on key sources and borrowing apply."""
        return self.profile == "strict"

    @property
    def signing_key_file(self) -> Path:
        """The file of the key that signs checkpoints."""
        return self.keyring_path.parent / self.signing_key_path

    @property
    def handover_key_file(self) -> Path:
        """The file of this worker's own key for hand-overs."""
        return self.keyring_path.parent / self.handover_key_path

    @property
    def clock_file(self) -> Path:
        """The file of the time floor."""
        return self.keyring_path.parent / self.clock_path

    def open_subject_keys(self) -> SubjectKeys | None:
        """Open the store of subject keys; None where names are in clear. Raises `ConfigError` where no setting
        decides.
        """
        clear = self.subject_names == "clear"
        return open_subject_keys(self.database_url, self.subject_keys_url, clear=clear)

    def open_clock(self, wall: Clock | None, stack: ExitStack) -> DeadlineClock:
        """Open the clock that deadlines are compared with, until `stack` ends."""
        jump, away = self.clock_jump_seconds_max, self.clock_away_days_max * _DAY_SECONDS
        return open_deadline_clock(wall, self.clock_file, stack, jump_seconds=jump, away_seconds=away)

    def shown(self) -> dict[str, str]:
        """Return every setting as text for people and logs, with the database password masked."""
        shown = {name: str(getattr(self, name)) for name in type(self).model_fields}
        for name, url in (("database_url", self.database_url), ("subject_keys_url", self.subject_keys_url)):
            shown[name] = str(url and database_place(url).masked())
        return shown


def load_settings(path: Path | None = None, **explicit: Any) -> Settings:
    """Load this process's settings; `path` replaces `KVCUSTODY_CONFIG`. Raises `ConfigError`."""
    named = os.environ.get(CONFIG_VARIABLE)
    if path is None and named:
        path = Path(named)
    file = read_settings_file(path, PREFIX)
    refuse_misspelt(_variables(Settings.model_fields, PREFIX))
    try:
        return Settings(**{**file.values, **explicit})
    except ValidationError as error:
        problems = error.errors(include_input=False, include_url=False)
        raise settings_error("settings", problems, Settings.model_fields, file, explicit) from None


def is_ledger_of(settings: Settings, path: Path) -> bool:
    """Whether this SQLite file is the ledger that the settings name."""
    place = database_place(settings.database_url)
    return not settings.control_plane and isinstance(place, SqliteFile) and place.path.resolve() == path.resolve()


def unknown_variables(environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return variables with our prefix that no setting reads; an orchestrator may set them."""
    environment = os.environ if environment is None else environment
    known = _variables(Settings.model_fields, PREFIX) | _READ_ELSEWHERE
    ours = (name for name in environment if name.upper().startswith(PREFIX))
    return tuple(
        sorted(name for name in ours if name.upper() not in known and not name.upper().startswith(SERVICE_PREFIX))
    )


def refuse_misspelt(variables: Iterable[str], environment: Mapping[str, str] | None = None) -> None:
    """Raise `ConfigError` where an unknown variable is close to one of `variables`."""
    known = {name.removeprefix(PREFIX): name for name in variables}
    others = _variables(Settings.model_fields, PREFIX) | _READ_ELSEWHERE | set(known.values())
    for name in sorted(os.environ if environment is None else environment):
        variable = name.upper()
        if not variable.startswith(PREFIX) or variable in others or _OF_AN_ORCHESTRATOR.search(variable):
            continue
        close = get_close_matches(variable.removeprefix(PREFIX), known, n=1, cutoff=_CLOSE)
        if close:
            raise ConfigError(
                f"environment: `{name}` is not a setting; did you mean `{known[close[0]]}`?", variable=name
            )


def _variables(fields: Iterable[str], prefix: str) -> set[str]:
    return {prefix + name.upper() for name in fields}


def settings_table() -> str:
    """Return the table of worker settings."""
    rows = ["| setting | variable | default | meaning |", "|---|---|---|---|"]
    for name, field in Settings.model_fields.items():
        default = field.default.human_readable() if isinstance(field.default, ByteSize) else field.default
        rows.append(f"| `{name}` | `{PREFIX}{name.upper()}` | `{default}` | {field.description} |")
    return "\n".join(rows) + "\n"


class SettingsFile(NamedTuple):
    """The values of a settings file without those that the environment overrides; `read` has their places in
    the YAML.
    """

    values: dict[str, Any]
    path: Path | None = None
    read: YamlValues | None = None

    def place(self, at: tuple[str | int, ...]) -> str | None:
        """Return the place of a value in the file; None where it has none."""
        if not at or at[0] not in self.values:
            return None
        return str(self.path) if self.read is None else self.read.place(at)


def read_settings_file(path: Path | None, prefix: str) -> SettingsFile:
    """Read the settings of a file; none without a file. Raises `ConfigError`."""
    if path is None:
        return SettingsFile({})
    values, read = _read(path)
    return SettingsFile(_below_environment(values, prefix), path, read)


def _below_environment(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    set_here = {name.upper() for name in os.environ}
    return {name: value for name, value in values.items() if (prefix + name).upper() not in set_here}


def _read(path: Path) -> tuple[dict[str, Any], YamlValues | None]:
    """The mapping in a TOML or YAML file; YAML is read as policies are, and has places."""
    try:
        if path.stat().st_size > _FILE_BYTES_MAX:
            raise ConfigError(f"settings file `{path}`: is larger than 1 MiB", path=path)
        content = path.read_bytes()
        read = None if path.suffix == ".toml" else read_values(content, str(path))
        data = tomllib.loads(content.decode("utf-8-sig")) if read is None else read.value
    except OSError as error:
        raise ConfigError(f"settings file `{path}`: cannot be read ({error.strerror})", path=path) from None
    except PolicyRejected as error:
        lines = "; ".join(document_problems(error).splitlines())
        raise ConfigError(f"settings file: {lines}", path=path) from None
    except (ValueError, RecursionError) as error:  # numerals and dates that are none, too
        first_line = " ".join(str(error).split())[:200]
        raise ConfigError(f"settings file `{path}`: {first_line}", path=path) from None
    if not isinstance(data, dict) or not all(isinstance(name, str) for name in data):
        raise ConfigError(f"settings file `{path}`: must be a mapping of settings", path=path)
    return data, read


def settings_error(
    kind: str,
    problems: Iterable[Any],
    names: Iterable[str],
    file: SettingsFile,
    explicit: Mapping[str, Any],
) -> ConfigError:
    """Return the error for pydantic's problems, each with its place in the file."""
    lines = []
    for problem in problems:
        place = None if problem["loc"][:1] and problem["loc"][0] in explicit else file.place(problem["loc"])
        said = settings_problem(problem, names)
        lines.append(said if place is None else f"{place}: {said}")
    text = "; ".join(lines)
    return ConfigError(f"{kind}: {text}", problems=text)


def settings_problem(problem: Any, names: Iterable[str]) -> str:
    """Return one problem's text without the input, which may be a password; for an unknown name, with a close one."""
    place = ".".join(str(part) for part in problem["loc"])
    message = str(problem["msg"]).removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if problem["type"] == "extra_forbidden":
        close = get_close_matches(place, names, n=1, cutoff=0.6)
        message = f"unknown setting; did you mean `{close[0]}`?" if close else "unknown setting"
    return f"`{place}` {message}" if place else message
