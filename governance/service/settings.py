"""Every setting of the service, with its default and meaning; docs/reference/service-settings.md shows the table.

1. By default the service listens on a Unix socket that its own user alone can open.
2. An address that other machines reach is refused without TLS.
3. Misspelt names and variables are refused as a worker's are.
"""

from __future__ import annotations

import ipaddress
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import SettingsConfigDict

from kvcustody.audit.evidence.cases.case_clock import WorkingCalendar, read_holidays, working_calendar
from kvcustody.audit.evidence.subjects.subject_key_store import SubjectKeys, open_subject_keys, store_beside
from kvcustody.audit.store.database.database_place import checked_setting
from kvcustody.audit.tlog.root_sealer import INTERVAL_SECONDS
from kvcustody.audit.tlog.signed_note import DEFAULT_ORIGIN, SigningKind, check_name
from kvcustody.clock import Clock
from kvcustody.deadline_clock import DeadlineClock, open_deadline_clock
from kvcustody.errors import ConfigError, CustodyError
from kvcustody.files import private_folder, read_words
from kvcustody.governance.credentials.json_web_token import (
    ALGORITHMS,
    LEEWAY_SECONDS,
    Algorithm,
    LeewaySeconds,
)
from kvcustody.governance.service.access.roles import ALONE, Role
from kvcustody.governance.settings import (
    SERVICE_PREFIX,
    LayeredSettings,
    read_settings_file,
    refuse_misspelt,
    settings_error,
)
from kvcustody.http_exchange import host_and_port, is_loopback
from kvcustody.time_zones import check_zone

PREFIX = SERVICE_PREFIX


class Issuer(BaseModel):
    """An OpenID Connect issuer: its keys, and its names of roles."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    issuer: Annotated[str, Field(min_length=1, max_length=512)]
    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,31}$")]
    audience: Annotated[str, Field(min_length=1, max_length=512)]
    keys: Annotated[str, Field(min_length=1, max_length=1024)]  # a JWKS: a file, or an https address
    algorithms: tuple[Algorithm, ...] = ALGORITHMS
    principal_claim: str = "sub"
    roles_claim: str = "roles"
    tenant_claim: str = "tenant"
    roles: dict[str, Role] = Field(default_factory=dict)  # the issuer's name of a role: ours
    leeway_seconds: LeewaySeconds = LEEWAY_SECONDS
    refresh_seconds: Annotated[int, Field(ge=10, le=86_400)] = 300  # of an address; a file is watched

    @field_validator("roles")
    @classmethod
    def _people(cls, value: dict[str, Role]) -> dict[str, Role]:
        for role in value.values():
            if role in ALONE:
                raise ValueError(f"a token can never give the role `{role.value}`")
        return value

    @field_validator("keys")
    @classmethod
    def _keys(cls, value: str) -> str:
        if "://" in value and not value.startswith("https://"):
            raise ValueError("is neither a file nor an https address")
        return value


class Webhook(BaseModel):
    """A webhook that gets every leaf, signed by Standard Webhooks (HMAC-SHA-256)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")]
    url: Annotated[str, Field(min_length=1, max_length=1024)]  # https, or http on loopback
    key_path: Path  # 0600, at least 24 bytes
    shape: Annotated[str, Field(pattern=r"^(ocsf|cloudevents|leaf|plugin:.+)$")] = "cloudevents"


class InboxWebhook(BaseModel):
    """A webhook that gets open tasks, signed by Standard Webhooks (HMAC-SHA-256)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: Annotated[str, Field(min_length=1, max_length=1024)]  # https, or http on loopback
    key_path: Path  # 0600, at least 24 bytes


class InboxMail(BaseModel):
    """A mailbox that gets open tasks. Beyond this machine, mail goes over TLS only."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    server: Annotated[str, Field(pattern=r"^[A-Za-z0-9.\[\]:-]+:[0-9]{1,5}$")]  # HOST:PORT
    sender: Annotated[str, Field(pattern=r"^[^\s@]+@[^\s@]+$", max_length=254)]
    to: Annotated[tuple[Annotated[str, Field(pattern=r"^[^\s@]+@[^\s@]+$", max_length=254)], ...], Field(min_length=1)]
    tls: Literal["starttls", "tls", "none"] = "starttls"  # `none`: to this machine alone
    user: Annotated[str, Field(max_length=254)] = ""
    password_path: Path | None = None  # 0600; with `user`

    @model_validator(mode="after")
    def _closed(self) -> InboxMail:
        host = self.server.rpartition(":")[0]
        if self.tls == "none" and host not in ("localhost", "127.0.0.1", "[::1]"):
            raise ValueError(f"`tls: none` is allowed for this machine only, and `{host}` is another one")
        if bool(self.user) != (self.password_path is not None):
            raise ValueError("set `user` and `password_path` together")
        return self


_DESTINATION = r"^[a-z0-9][a-z0-9-]{0,31}$"


class _ReportDestination(BaseModel):
    """Where scheduled reports may be handed over to, under a name: nowhere else (`service.schedules`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=_DESTINATION)]
    tenants: tuple[Annotated[str, Field(min_length=1, max_length=257)], ...] = ()
    # whose own people may send their tenant's reports here; who sees all tenants may send any


class ReportFolder(_ReportDestination):
    """A folder of this machine that only the service's user may write in."""

    kind: Literal["folder"]
    path: Path


class ReportStore(_ReportDestination):
    """A bucket of an S3 store, addressed by path; requests are signed (AWS Signature Version 4)."""

    kind: Literal["s3"]
    endpoint: Annotated[str, Field(min_length=1, max_length=512)]  # https, or http on loopback
    bucket: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$")]
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9._/-]{0,256}$")] = ""
    region: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,64}$")] = "us-east-1"
    access_key_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.+=/-]{1,128}$")]
    secret_path: Path  # 0600


class ReportWebhook(_ReportDestination):
    """A webhook that gets reports, signed by Standard Webhooks (HMAC-SHA-256)."""

    kind: Literal["webhook"]
    url: Annotated[str, Field(min_length=1, max_length=1024)]  # https, or http on loopback
    key_path: Path  # 0600, at least 24 bytes


ReportDestination = Annotated[ReportFolder | ReportStore | ReportWebhook, Field(discriminator="kind")]


class ServiceSettings(LayeredSettings):
    """The settings of one service process; build it with `load_service_settings`."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True, validate_default=True)
    _makes_subject_keys: bool = PrivateAttr(default=True)

    name: str = Field(
        "control-plane",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="Name of this process in the ledger. Each process of a ledger needs its own.",
    )
    database_url: str = Field(
        "sqlite:///kvcustody.db", repr=False, description="The ledger: an SQLite file or a PostgreSQL server."
    )
    migrate: bool = Field(
        True,
        description="Whether a start upgrades the schema of the ledger. false: it refuses to start on an older schema, "
        "until `kvcustody db upgrade` has run (docs/how-to/upgrade.md).",
    )
    subject_keys_url: str | None = Field(
        None,
        repr=False,
        description="URL of the store of subject keys (an SQLite file or a PostgreSQL server). Workers that write to "
        "this ledger directly must use the same one. People can be found by name only through it. Default for a SQLite "
        "ledger: `NAME-subjects.db` next to it, mode 0600. Required for a ledger on a server.",
    )
    subject_names: Literal["sealed", "clear"] = Field(
        "sealed",
        description="`sealed`: the ledger holds no subject names. `clear`: without a store of subject keys, the "
        "ledger and all its backups hold names.",
    )
    state_path: Path = Field(
        Path("kvcustody-service"),
        description="Folder for the service's secret, spill and finished jobs. Only its own user may have access.",
    )
    listen: str = Field(
        "unix:kvcustody-service/api.sock",
        description="`unix:PATH` or `HOST:PORT`. An address that other machines can reach needs TLS.",
    )
    workers_listen: str = Field(
        "",
        description="A second address, for workers only, that requires client certificates. Empty: none.",
    )
    signing_key_path: Path = Field(
        Path("kvcustody-signing.key"),
        description="The key that signs the ledger's checkpoints, mode 0600. It is created if the ledger has none.",
    )
    signing_key_kind: SigningKind = Field(
        "ed25519",
        description="Type of key to create if the ledger has none: `ed25519` or `ml-dsa-44` (post-quantum).",
    )
    report_key_path: Path = Field(
        Path("kvcustody-report.key"),
        description=(
            "The key that signs evidence reports and nothing else, mode 0600. It is created with the first report."
        ),
    )
    ledger_origin: str = Field(
        DEFAULT_ORIGIN,
        description="Name of the ledger in its checkpoints (C2SP origin). It is fixed once the key exists. The "
        "default adds the ledger's identity, so that every name is unique.",
    )
    checkpoint_seconds: float = Field(1.0, gt=0.0, le=3600.0, description="Seconds between signed checkpoints.")
    root_interval_seconds: float = Field(
        INTERVAL_SECONDS,
        gt=0.0,
        le=3600.0,
        description="Seconds within which a process seals committed leaves under a checkpoint, or sooner if a proof "
        "is requested. Leaves unsealed for three times as long are overdue.",
    )
    figures_seconds: float = Field(
        15.0,
        gt=0.0,
        le=3600.0,
        description="Seconds between updates of hourly figures and of hourly coverage. Coverage uses at most a "
        "twentieth of the time.",
    )
    statement_seconds: float = Field(
        300.0,
        gt=0.0,
        le=86_400.0,
        description="Maximum seconds of a read statement on PostgreSQL. The server cancels a longer one.",
    )
    console: bool = Field(
        True, description="Whether to serve the operator console at `/console/`. false: only the API."
    )
    policy_trust: Path | None = Field(
        None,
        description="Trust configuration for policies (docs/how-to/policy/release-a-policy.md). Without it this "
        "service releases no policy.",
    )
    order_key_path: Path | None = Field(
        None,
        description="The key that signs this service's orders, or `plugin:NAME`. `policy_trust` must list it with "
        "the role `orders`. With `policy_trust` and no such key, orders are refused.",
    )
    tls_certificate_path: Path | None = Field(None, description="PEM certificate chain of the service.")
    tls_key_path: Path | None = Field(None, description="PEM key of the service, mode 0600.")
    tls_client_ca_path: Path | None = Field(
        None, description="PEM file of the authorities that sign workers' client certificates."
    )
    issuers: tuple[Issuer, ...] = Field(
        (), description="OpenID Connect issuers; in a file, or as JSON in the variable."
    )
    webhooks: tuple[Webhook, ...] = Field(
        (), description="Webhooks that receive every leaf. Set it in a file, or as JSON in the variable."
    )
    inbox_webhook: InboxWebhook | None = Field(
        None,
        description=(
            "Webhooks that receive each new item of the inbox once. Set it in a file, or as JSON in the variable."
        ),
    )
    inbox_mail: InboxMail | None = Field(
        None,
        description="Mail addresses that receive new items of the inbox, one mail per check. Set it in a file, or "
        "as JSON in the variable.",
    )
    inbox_seconds: float = Field(
        60.0,
        ge=0.05,
        le=86_400.0,
        description="Seconds between checks for new items of the inbox.",
    )
    report_destinations: tuple[ReportDestination, ...] = Field(
        (),
        description="Destinations for scheduled reports, by name: folders, S3-compatible stores, webhooks. Set it "
        "in a file, or as JSON in the variable.",
    )
    report_seconds: float = Field(
        15.0,
        ge=0.05,
        le=3600.0,
        description="Seconds between checks for due reports and pending deliveries.",
    )
    report_retry_seconds: float = Field(
        30.0,
        ge=0.05,
        le=3600.0,
        description="Seconds until a failed delivery is retried. It doubles each time, up to six hours.",
    )
    time_zone: str = Field(
        "UTC", description="Default time zone of schedules (IANA name). It decides when a week or month ends."
    )
    tenant_time_zones: dict[str, str] = Field(
        default_factory=dict,
        description="Default time zone for reports of single tenants. Set it in a file, or as JSON in the variable.",
    )
    worker_clock_seconds: float = Field(
        300.0,
        gt=0,
        le=86_400,
        description=(
            "Seconds that a worker's clock may differ from this service's. A worker with a larger difference is "
            "refused."
        ),
    )
    worker_silence_days: int = Field(
        7,
        ge=0,
        le=3650,
        description="Days of silence after which a worker's process is closed as dead and its custody as unproven. "
        "0: never. Until then a disconnected worker keeps its spill and continues when it returns.",
    )
    epoch_minutes: int = Field(
        240,
        ge=1,
        le=10_080,
        description="Longest interval, in minutes, between batches that change the routers' name for a tenant's "
        "shared prompts after erasures of single subjects. A batch always runs before the earliest "
        "pending deadline.",
    )
    namespace_days: int = Field(
        30,
        ge=1,
        le=3650,
        description="Days after which doors and workers change the names that routers see. Raised erase epochs are "
        "kept as long, and at least for the longest ceiling of the policies in effect.",
    )
    requests_per_second: float = Field(
        50.0, gt=0, le=1e6, description="Sustained requests per second of one principal."
    )
    requests_burst: int = Field(200, ge=1, description="Burst size: requests of one principal at once.")
    failures_per_minute: int = Field(
        60,
        ge=1,
        description="Invalid credentials per minute from one address that get 401; more get 429. Valid credentials "
        "are never affected.",
    )
    key_failures_per_minute: int = Field(
        60, ge=1, description="Invalid credentials per minute with one key prefix, from any address."
    )
    trusted_proxies: tuple[str, ...] = Field(
        (),
        description="Trusted proxies: addresses or networks (`10.0.0.0/8`; `unix`: clients of the socket) whose "
        "`X-Forwarded-For` and `X-Forwarded-Proto` are believed. Set it in a file, or as JSON in the "
        "variable.",
    )
    header_bytes_max: ByteSize = Field(
        ByteSize(32 << 10), ge=1024, description="Maximum bytes of a request's head (path and headers)."
    )
    headers_max: int = Field(100, ge=8, description="Maximum number of headers of a request.")
    header_seconds: float = Field(10.0, gt=0, le=3600, description="Seconds within which a request's head must arrive.")
    body_seconds: float = Field(60.0, gt=0, le=3600, description="Seconds within which a request's body must arrive.")
    connections_max: int = Field(
        8192,
        ge=1,
        description="Maximum connections of one listener. A new one replaces the one that has been idle longest. A "
        "worker uses four. The process raises its limit of open files as needed.",
    )
    address_connections_max: int = Field(
        2048,
        ge=1,
        description="Maximum connections of one address until they authenticate, then of one principal or tenant. "
        "The Unix socket and trusted proxies are exempt. A new connection replaces an idle one of the "
        "same caller.",
    )
    running_requests_max: int = Field(
        256,
        ge=1,
        description="Maximum concurrent requests, a quarter of them for one tenant; more get 503. Held long polls "
        "do not count while they wait. Requests without a credential have a separate quarter.",
    )
    body_bytes_max: ByteSize = Field(ByteSize(4 << 20), description="Maximum bytes of a request's body.")
    batch_bytes_max: ByteSize = Field(ByteSize(16 << 20), description="Maximum bytes of a worker's ledger batch.")
    batch_readers: int | None = Field(
        None,
        ge=0,
        le=64,
        description="Number of processes that check workers' batches, started when a large batch arrives. Default: "
        "one per core except the first, at most four.",
    )
    policy_work_seconds: float = Field(
        60.0,
        ge=1.0,
        le=3600.0,
        description="Maximum seconds for work on one policy (proof, comparison, lint, simulation). It runs in a "
        "separate process, one at a time.",
    )
    policy_work_bytes_max: ByteSize = Field(
        ByteSize(2 << 30), ge=256 << 20, description="Maximum memory of that process, in bytes."
    )
    key_days: int = Field(90, ge=1, le=366, description="Default days until a new key expires.")
    session_minutes: int = Field(480, ge=1, le=1440, description="Maximum length of a person's session, in minutes.")
    session_idle_minutes: int = Field(30, ge=1, le=1440, description="Minutes after which an idle session ends.")
    answers_hours: int = Field(24, ge=1, le=720, description="Hours that answers for idempotency keys are kept.")
    shutdown_seconds: int = Field(
        20, ge=1, le=600, description="Seconds that running requests get to finish at shutdown."
    )
    clock_jump_seconds_max: int = Field(
        3600,
        ge=1,
        le=86_400,
        description="Seconds that the wall clock may run ahead of the boot clock since boot. Beyond that no policy "
        "is released until an operator confirms the clock.",
    )
    clock_away_days_max: int = Field(
        30,
        ge=1,
        le=3650,
        description="Seconds that the clock may advance while the machine is off, before the same applies.",
    )
    case_zone: str = Field(
        "UTC",
        description=(
            "The controller's time zone (IANA name). Deadlines of data subject requests are counted in its days."
        ),
    )
    case_holidays_path: Path | None = Field(
        None,
        description="File of the controller's public holidays, one date a line. A period that ends on one, or on a "
        "weekend, ends on the next working day. Empty: only weekends.",
    )
    tenant_labels: Literal["pseudonym", "name", "none"] = Field(
        "pseudonym", description="How a tenant appears in metrics."
    )
    tenant_labels_max: int = Field(
        100, ge=0, le=10_000, description="Maximum number of tenants with metrics of their own. The rest are added up."
    )
    tracing: Literal["off", "otlp"] = Field(
        "off",
        description="Tracing: `otlp` sends spans of requests to `OTEL_EXPORTER_OTLP_ENDPOINT` (needs "
        "`kvcustody[otel]`).",
    )
    tracing_tenants: bool = Field(False, description="Whether spans contain the caller's tenant.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe level.")
    log_format: Literal["json", "console"] = Field("json", description="Log format: one JSON object a line, or text.")

    def of_command(self) -> ServiceSettings:
        """Return these settings for a command on the ledger's files, which creates no store of subject keys.

        A store that a command made would name nobody whom the ledger knows.
        """
        made = self.model_copy()
        made._makes_subject_keys = False
        return made

    def open_subject_keys(self) -> SubjectKeys | None:
        """Open the store of subject keys; None where names are in clear, and for a command without one.

        Raises `ConfigError` where it is not said.
        """
        clear = self.subject_names == "clear"
        if not self._makes_subject_keys and self.subject_keys_url is None:
            beside = store_beside(self.database_url)
            if beside is None or not beside.exists():
                return None
        return open_subject_keys(self.database_url, self.subject_keys_url, clear=clear)

    def make_state_folder(self) -> None:
        """Create the state folder with access for its user only; raises `ConfigError` where others have access."""
        path = self.state_path
        try:
            private_folder(path)
            mode = path.stat().st_mode
        except OSError as error:
            raise ConfigError(f"state folder `{path}`: {error.strerror}", path=path) from None
        if mode & 0o077:
            raise ConfigError(f"state folder `{path}`: is open to others; chmod 700 it", path=path)

    def case_calendar(self) -> WorkingCalendar:
        """Return the calendar of people's requests; raises `ConfigError` for an invalid list."""
        path = self.case_holidays_path
        try:
            text = "" if path is None else read_words(path)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"case_holidays_path: `{path}` cannot be read: {error}", path=path) from None
        return working_calendar(self.case_zone, read_holidays(text))

    @property
    def certificates(self) -> tuple[Path, ...]:
        """The certificates that this service presents, and those that it trusts."""
        return tuple(path for path in (self.tls_certificate_path, self.tls_client_ca_path) if path is not None)

    def open_clock(self, wall: Clock | None, stack: ExitStack) -> DeadlineClock:
        """Open the clock that deadlines are compared with, until `stack` ends."""
        jump, away = self.clock_jump_seconds_max, self.clock_away_days_max * 86_400
        return open_deadline_clock(wall, self.clock_file, stack, jump_seconds=jump, away_seconds=away)

    @property
    def report_key_file(self) -> Path:
        """The file of the key that signs reports: beside the checkpoint key, unless it names a folder."""
        return self.signing_key_path.parent / self.report_key_path

    @property
    def clock_file(self) -> Path:
        """The file of the time floor."""
        return self.state_path / "clock.json"

    @property
    def readers(self) -> int:
        """The number of processes that parse batches."""
        return min(4, (os.cpu_count() or 1) - 1) if self.batch_readers is None else self.batch_readers

    @property
    def proxies(self) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network | None, ...]:
        """The networks of trusted proxies; None stands for the Unix socket."""
        return tuple(None if text == "unix" else ipaddress.ip_network(text) for text in self.trusted_proxies)

    @field_validator("database_url", "subject_keys_url")
    @classmethod
    def _databases(cls, value: str | None) -> str | None:
        return checked_setting(value, path=True)

    @field_validator("trusted_proxies")
    @classmethod
    def _trusted(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            try:
                if text != "unix":
                    ipaddress.ip_network(text)
            except ValueError:
                raise ValueError(f"`{text}` is neither an address, a network nor `unix`") from None
        return value

    @field_validator("time_zone", "tenant_time_zones", "case_zone")
    @classmethod
    def _zones(cls, value: str | dict[str, str]) -> str | dict[str, str]:
        for zone in value.values() if isinstance(value, dict) else (value,):
            try:
                check_zone(zone)
            except ConfigError as error:
                raise ValueError(error.message) from None
        return value

    @field_validator("ledger_origin")
    @classmethod
    def _ledger_origin(cls, value: str) -> str:
        try:
            check_name(value)
        except CustodyError as error:
            raise ValueError(error.message) from None
        return value

    @model_validator(mode="after")
    def _reachable(self) -> ServiceSettings:
        tls = self.tls_certificate_path is not None and self.tls_key_path is not None
        if (self.tls_certificate_path is None) != (self.tls_key_path is None):
            raise ValueError("tls_certificate_path: set certificate and key together")
        host = address(self.listen)[0]
        if host is not None and not is_loopback(host) and not tls:
            raise ValueError(f"listen: `{host}` is reached by other machines; give TLS, or use a loopback address")
        if self.workers_listen and (not tls or self.tls_client_ca_path is None):
            raise ValueError("workers_listen: needs TLS and tls_client_ca_path")
        if self.workers_listen and address(self.workers_listen)[0] is None:
            raise ValueError("workers_listen: must be HOST:PORT")
        if self.subject_names == "clear" and self.subject_keys_url is not None:
            raise ValueError("subject_names: `clear` is for a ledger without `subject_keys_url`")
        names = [issuer.name for issuer in self.issuers] + [issuer.issuer for issuer in self.issuers]
        if len(set(names)) != len(names):
            raise ValueError("issuers: two are the same")
        for what in ("webhooks", "report_destinations"):
            given = getattr(self, what)
            if len({each.name for each in given}) != len(given):
                raise ValueError(f"{what}: two have one name")
        return self

    @property
    def tls(self) -> bool:
        """Whether the service speaks TLS."""
        return self.tls_key_path is not None


def address(listen: str) -> tuple[str | None, str | int]:
    """Parse (host, port), or (None, path) of a Unix socket; raises `ValueError` for anything else."""
    if listen.startswith("unix:") and len(listen) > len("unix:"):
        return None, listen.removeprefix("unix:")
    try:
        return host_and_port(listen)
    except ValueError:
        raise ValueError(f"listen: `{listen}` is neither `unix:PATH` nor `HOST:PORT`") from None


def load_service_settings(path: Path | None = None, **explicit: Any) -> ServiceSettings:
    """Load the settings from arguments, environment and file, in this order; raises `ConfigError`."""
    file = read_settings_file(path, PREFIX)
    refuse_misspelt({PREFIX + name.upper() for name in ServiceSettings.model_fields})
    try:
        return ServiceSettings(**{**file.values, **explicit})
    except ValidationError as error:
        found = error.errors(include_input=False, include_url=False)
        raise settings_error("service settings", found, ServiceSettings.model_fields, file, explicit) from None


def service_settings_table() -> str:
    """Return the table of the service's settings."""
    rows = ["| setting | variable | default | meaning |", "|---|---|---|---|"]
    for name, field in ServiceSettings.model_fields.items():
        default = field.default.human_readable() if isinstance(field.default, ByteSize) else field.default
        default = default if field.default_factory is None else None
        shown = "" if default in (None, "", ()) else f"`{default}`"
        rows.append(f"| `{name}` | `{PREFIX}{name.upper()}` | {shown} | {field.description} |")
    return "\n".join(rows) + "\n"
