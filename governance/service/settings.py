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
                raise ValueError(f"`{role.value}` is never given by a token")
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
            raise ValueError(f"`tls: none` sends to this machine alone, and `{host}` is another")
        if bool(self.user) != (self.password_path is not None):
            raise ValueError("`user` and `password_path` go together")
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
        description="Name of this process in the ledger; each process of one ledger has its own.",
    )
    database_url: str = Field(
        "sqlite:///kvcustody.db", repr=False, description="The ledger: an SQLite file or a PostgreSQL server."
    )
    subject_keys_url: str | None = Field(
        None,
        repr=False,
        description="The store of subject keys (an SQLite file or a PostgreSQL server, as a URL), the same as that of "
        "workers that write to this ledger themselves: people are found by name here alone. Without it one is made "
        "beside a SQLite ledger (`NAME-subjects.db`, 0600); a ledger on a server needs it.",
    )
    subject_names: Literal["sealed", "clear"] = Field(
        "sealed",
        description="`sealed`: the ledger names no subject. `clear`: without a store of subject keys names stand in "
        "the ledger and in every backup of it.",
    )
    state_path: Path = Field(
        Path("kvcustody-service"),
        description="Folder of the service's secret, spill and finished jobs; its own user alone may enter.",
    )
    listen: str = Field(
        "unix:kvcustody-service/api.sock",
        description="`unix:PATH`, or `HOST:PORT`; a host that is not this machine needs TLS.",
    )
    workers_listen: str = Field(
        "",
        description="A second address that serves workers alone and demands client certificates; empty: none.",
    )
    signing_key_path: Path = Field(
        Path("kvcustody-signing.key"),
        description="The key that signs the ledger's checkpoints: 0600, made where the ledger has none yet.",
    )
    signing_key_kind: SigningKind = Field(
        "ed25519",
        description="What kind is made where the ledger has none: `ed25519`, or `ml-dsa-44` (post-quantum).",
    )
    report_key_path: Path = Field(
        Path("kvcustody-report.key"),
        description="The key that signs evidence reports and nothing else: 0600, made with the first report.",
    )
    ledger_origin: str = Field(
        DEFAULT_ORIGIN,
        description="Name of the ledger in its checkpoints (C2SP origin); it stays with the key. A key that is made "
        "under the default has the ledger's identity behind it: no two are named alike.",
    )
    checkpoint_seconds: float = Field(1.0, gt=0.0, le=3600.0, description="Seconds between signatures of checkpoints.")
    root_interval_seconds: float = Field(
        INTERVAL_SECONDS,
        gt=0.0,
        le=3600.0,
        description="Seconds within which what is committed is sealed under a checkpoint, by any process that has the "
        "ledger; sooner where somebody waits for a proof. What nobody has sealed for three times as long is overdue.",
    )
    figures_seconds: float = Field(
        15.0,
        gt=0.0,
        le=3600.0,
        description="Seconds between turns of the background work on figures: folding, and verdicts of coverage by "
        "hour (a pass of these takes at most a twentieth of the time).",
    )
    statement_seconds: float = Field(
        300.0,
        gt=0.0,
        le=86_400.0,
        description="Longest that one statement of a reader may take on PostgreSQL; the server ends one that runs on.",
    )
    console: bool = Field(True, description="Serve the operator console at `/console/`; false: the API alone.")
    policy_trust: Path | None = Field(
        None,
        description="Trust configuration of policies (docs/how-to/policy/release-a-policy.md); without one, none is "
        "released here.",
    )
    order_key_path: Path | None = Field(
        None,
        description="The key that signs this service's orders, or `plugin:NAME`: `policy_trust` names it with the role "
        "`orders`. With `policy_trust` and no such key, orders are refused.",
    )
    tls_certificate_path: Path | None = Field(None, description="PEM certificate chain of the service.")
    tls_key_path: Path | None = Field(None, description="PEM key of the service, mode 0600.")
    tls_client_ca_path: Path | None = Field(
        None, description="PEM of the authorities whose client certificates workers may present."
    )
    issuers: tuple[Issuer, ...] = Field(
        (), description="OpenID Connect issuers; in a file, or as JSON in the variable."
    )
    webhooks: tuple[Webhook, ...] = Field(
        (), description="Where every leaf is pushed to; in a file, or as JSON in the variable."
    )
    inbox_webhook: InboxWebhook | None = Field(
        None,
        description="Where items of the inbox are posted to, each once; in a file, or as JSON in the variable.",
    )
    inbox_mail: InboxMail | None = Field(
        None,
        description="Where items of the inbox are mailed to, the new ones of a turn in one mail; in a file, or as JSON "
        "in the variable.",
    )
    inbox_seconds: float = Field(
        60.0,
        ge=0.05,
        le=86_400.0,
        description="Seconds between looks at the inbox for what is to be delivered.",
    )
    report_destinations: tuple[ReportDestination, ...] = Field(
        (),
        description="Where schedules may hand reports over to, by name: folders, stores that speak S3, webhooks; in a "
        "file, or as JSON in the variable.",
    )
    report_seconds: float = Field(
        15.0,
        ge=0.05,
        le=3600.0,
        description="Seconds between looks for reports that are due and deliveries that wait.",
    )
    report_retry_seconds: float = Field(
        30.0,
        ge=0.05,
        le=3600.0,
        description="Seconds until a delivery that failed is tried again; twice as long each time, six hours at most.",
    )
    time_zone: str = Field(
        "UTC", description="Time zone of schedules that name none (IANA name): when a week or month ends."
    )
    tenant_time_zones: dict[str, str] = Field(
        default_factory=dict,
        description="The same for reports of one tenant; in a file, or as JSON in the variable.",
    )
    worker_clock_seconds: float = Field(
        300.0,
        gt=0,
        le=86_400,
        description="How far a worker's clock may be from this service's: one that is further is not put on record.",
    )
    worker_silence_days: int = Field(
        7,
        ge=0,
        le=3650,
        description="Days without a word after which a worker's process is closed as dead, its custody as unproven; "
        "0: never. A worker that is cut off holds its spill for as long, and goes on where it was when it returns.",
    )
    epoch_minutes: int = Field(
        240,
        ge=1,
        le=10_080,
        description="Erasures of single subjects end the name that routers have for a tenant's shared prompts in one "
        "batch: before the earliest deadline that waits, and at most so many minutes after the batch before.",
    )
    namespace_days: int = Field(
        30,
        ge=1,
        le=3650,
        description="Days after which doors and workers replace routers' names: a raised erase epoch is kept as long, "
        "and at least for the longest ceiling of the policies in effect.",
    )
    requests_per_second: float = Field(
        50.0, gt=0, le=1e6, description="Requests a second that one principal may make for long."
    )
    requests_burst: int = Field(200, ge=1, description="Requests that one principal may make at once.")
    failures_per_minute: int = Field(
        60,
        ge=1,
        description="Credentials a minute from one address that are refused with 401; more get 429. "
        "One that verifies is never refused for others.",
    )
    key_failures_per_minute: int = Field(
        60, ge=1, description="The same for keys that have one prefix, from wherever they come."
    )
    trusted_proxies: tuple[str, ...] = Field(
        (),
        description="Addresses or networks (`10.0.0.0/8`; `unix`: whoever opens the socket) whose "
        "`X-Forwarded-For` says where a request comes from, and `X-Forwarded-Proto` whether by TLS; in a file, or as "
        "JSON in the variable.",
    )
    header_bytes_max: ByteSize = Field(
        ByteSize(32 << 10), ge=1024, description="Largest head of a request, path and headers."
    )
    headers_max: int = Field(100, ge=8, description="Most headers of a request.")
    header_seconds: float = Field(10.0, gt=0, le=3600, description="Seconds in which a request's head must be there.")
    body_seconds: float = Field(60.0, gt=0, le=3600, description="Seconds in which a request's body must be there.")
    connections_max: int = Field(
        8192,
        ge=1,
        description="Connections of one listener; a new one takes the place of the one that waited longest. A worker "
        "has four. The process raises its limit of open files to what they need.",
    )
    address_connections_max: int = Field(
        2048,
        ge=1,
        description="Connections of one address, but for the Unix socket and trusted proxies, until a request of "
        "theirs is authenticated, and then of one principal, or of all of a tenant's; a new one takes the place of one "
        "of its own that waits.",
    )
    running_requests_max: int = Field(
        256,
        ge=1,
        description="Requests in work at one time, a quarter of them for one tenant; more get 503. Questions that are "
        "held open have no place while they wait. Those that "
        "need no credential have a quarter as many places beside them.",
    )
    body_bytes_max: ByteSize = Field(ByteSize(4 << 20), description="Largest body of a request.")
    batch_bytes_max: ByteSize = Field(ByteSize(16 << 20), description="Largest ledger batch of a worker.")
    batch_readers: int | None = Field(
        None,
        ge=0,
        le=64,
        description="Processes that check workers' batches beside the one that commits them, begun when a large batch "
        "comes; by default one for each core but the first, at most four.",
    )
    policy_work_seconds: float = Field(
        60.0,
        ge=1.0,
        le=3600.0,
        description="Seconds that work on one policy may take (a proof, a comparison, lint, a simulation); it is done "
        "in a process beside, one at a time, and more is refused.",
    )
    policy_work_bytes_max: ByteSize = Field(
        ByteSize(2 << 30), ge=256 << 20, description="The same for the memory of that process."
    )
    key_days: int = Field(90, ge=1, le=366, description="Days until a new key expires, unless it is told otherwise.")
    session_minutes: int = Field(480, ge=1, le=1440, description="Minutes that a person's session lasts.")
    session_idle_minutes: int = Field(30, ge=1, le=1440, description="Minutes after which an idle session ends.")
    answers_hours: int = Field(24, ge=1, le=720, description="Hours that answers to idempotency keys are kept.")
    shutdown_seconds: int = Field(20, ge=1, le=600, description="Seconds that requests in work get at the end.")
    clock_jump_seconds_max: int = Field(
        3600,
        ge=1,
        le=86_400,
        description="How far the wall clock may step ahead of the boot clock, in all of one boot, before nothing is "
        "released until an operator confirms it.",
    )
    clock_away_days_max: int = Field(30, ge=1, le=3650, description="The same for the time that this machine was off.")
    case_zone: str = Field(
        "UTC",
        description="The controller's time zone (IANA), by whose days the clock of a person's request runs.",
    )
    case_holidays_path: Path | None = Field(
        None,
        description="The controller's public holidays, a date a line: a period that ends on one, or on a weekend, ends "
        "with the next working day. None: weekends alone.",
    )
    tenant_labels: Literal["pseudonym", "name", "none"] = Field(
        "pseudonym", description="How a tenant appears in metrics."
    )
    tenant_labels_max: int = Field(
        100, ge=0, le=10_000, description="Most tenants with metrics of their own; the rest are added up."
    )
    tracing: Literal["off", "otlp"] = Field(
        "off",
        description="Spans of requests: `otlp` sends them where `OTEL_EXPORTER_OTLP_ENDPOINT` says "
        "(needs `kvcustody[otel]`).",
    )
    tracing_tenants: bool = Field(False, description="Whether spans name the tenant of their caller.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe level.")
    log_format: Literal["json", "console"] = Field("json", description="One JSON object a line, or text.")

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
            raise ValueError("tls_certificate_path: certificate and key belong together")
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
            raise ValueError("issuers: two are alike")
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
