"""Checks of this machine and installation: limits, memory, time, packages, variables."""

from __future__ import annotations

import ctypes
import re
import resource
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec

from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.console.doctor.findings import (
    Diagnosis,
    Examined,
    check,
    optional,
    problem,
    skipped,
    warning,
    worker_check,
)
from kvcustody.governance.keys.core_dumps import switched_on
from kvcustody.governance.service.open_files import files_needed
from kvcustody.governance.settings import Settings, unknown_variables
from kvcustody.governance.tiers.stores.open_remote import SCHEMES
from kvcustody.governance.worker.known_engines import VLLM_BELOW, VLLM_OLDEST

_FILES_OF_WORKER = 1024
_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronised
_ENGINES = ("transformers", "sglang", "lmcache")
_NOT_OF_USERS = ("all", "test", "dev", "docs")
_OPTIONAL = re.compile(
    r"(?P<name>[A-Za-z0-9._-]+)(\[[^]]*\])?(?P<bounds>[^;]*);.*extra == ['\"](?P<extra>[^'\"]+)['\"]"
)
_EXTRA_OF = {scheme: scheme for scheme in SCHEMES} | {"valkeys": "valkey"}
_OF_CHECKOUT = {"testkit": "in the checkout, pip install ./packaging/testkit"}
_ALSO = {"mooncake-transfer-engine": "mooncake-transfer-engine-non-cuda"}  # the same, under another name


@check("files", "enough files may be open")
def files(subject: Examined) -> Iterator[Diagnosis]:
    """Check the limit of open files: a service needs one for each connection."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES_OF_WORKER if subject.service is None else files_needed(subject.service)
    if hard != resource.RLIM_INFINITY and hard < needed:
        where = "`LimitNOFILE=` of systemd, `ulimits.nofile` of Compose, or `ulimit -Hn`"
        yield problem(f"{hard} files may be open at most, and {needed} are needed", f"raise it by {where}")


@check("core-dumps", "crashes do not write memory to disk")
def core_dumps(subject: Examined) -> Iterator[Diagnosis]:
    """Check that core dumps are off: they contain tenants' blocks and keys."""
    switches = switched_on(subject.environment)
    if switches:
        yield problem(
            f"`{'`, `'.join(switches)}` would write device memory to a file when a kernel fails",
            "unset it where tenants are served",
        )
    soft, _ = resource.getrlimit(resource.RLIMIT_CORE)
    if soft:
        yield warning(
            "a crash writes this process's memory to a file",
            "set `LimitCORE=0`, or `ulimit -c 0`; the strict profile sets it itself",
        )


@worker_check("locked-memory", "keys and tiers' plaintext stay out of swap")
def locked_memory(_subject: Examined, worker: Settings) -> Iterator[Diagnosis]:
    """Check the limit of locked memory: keys and staging buffers are locked."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    tiers = worker.host_tier_bytes or worker.nvme_tier_path or worker.remote_tier_url
    needed = (64 << 20) if tiers else (1 << 20)
    if soft != resource.RLIM_INFINITY and soft < needed:
        yield problem(
            f"{soft >> 10} KiB may be locked in memory, and {needed >> 10} KiB are needed",
            "raise it by `LimitMEMLOCK=` or `ulimit -l`, or run without swap",
        )


@check("time", "the machine's clock is synchronised")
def synchronised_clock(_subject: Examined) -> Iterator[Diagnosis]:
    """Check that the clock is synchronised: deadlines are compared with this machine's clock."""
    if clock_status() == _TIME_ERROR:
        yield warning("the machine's clock is not synchronised", "start chrony, ntpd or systemd-timesyncd")


def clock_status() -> int:
    """Return the result of adjtimex(2); -1 where it is not permitted."""
    buffer = ctypes.create_string_buffer(512)  # struct timex, with room: all zero asks and changes nothing
    return int(ctypes.CDLL(None).adjtimex(buffer))


@check("variables", "every variable that begins with KVCUSTODY_ is a setting")
def variables(subject: Examined) -> Iterator[Diagnosis]:
    """Check for misspelt variables, which have no effect."""
    for name in unknown_variables(subject.environment):
        yield warning(f"variable `{name}` is not a setting, and has no effect", "correct its name, or unset it")


@check("packages", "every package that the settings need is installed")
def packages(subject: Examined) -> Iterator[Diagnosis]:
    """Check that the packages for the given settings are installed."""
    used = [] if subject.worker is None else ["engine"]
    if (service := subject.service) is not None:
        used += ["service", *(["otel"] if service.tracing == "otlp" else [])]
    if subject.engine is not None and dialect_of(subject.engine).roles:
        used.append("postgres")
    if (worker := subject.worker) is not None:
        scheme = worker.remote_tier_url.partition(":")[0]
        used += [_EXTRA_OF[scheme]] if scheme in _EXTRA_OF else []
        used += [extra for extra, given in (("nats", worker.nats), ("events", worker.kv_events_endpoint)) if given]
    for name, extra, _ in _optional():
        if extra in used and _version(name) is None:
            yield problem(f"`{name}` is not installed", install_command(extra))


@check("extras", "every optional part is installed")
def extras(_subject: Examined) -> Iterator[Diagnosis]:
    """Check which extras lack a package; none is required in itself."""
    absent: dict[str, list[str]] = {}
    for name, extra, _ in _optional():
        if extra not in _NOT_OF_USERS and _version(name) is None:
            absent.setdefault(extra, []).append(name)
    for extra, names in absent.items():
        yield optional(f"extra `{extra}` lacks {', '.join(names)}", _OF_CHECKOUT.get(extra) or install_command(extra))


@check("engines", "every engine that is installed is a known release")
def engines(_subject: Examined) -> Iterator[Diagnosis]:
    """Check the installed engines' releases: each adapter knows some of them."""
    known: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {"vllm": (VLLM_OLDEST, VLLM_BELOW)}
    for name, _, bounds in _optional():
        least, below = re.search(">=([0-9.]+)", bounds), re.search("<([0-9.]+)", bounds)
        if name in _ENGINES and least is not None and below is not None:
            known[name] = _numbers(least[1]), _numbers(below[1])
    versions = {name: version for name in known if (version := _version(name)) is not None}
    for name, version in versions.items():
        oldest, first_unknown = known[name]
        if not oldest <= _numbers(version) < first_unknown:
            bounds = f"{name}>={_text(oldest)},<{_text(first_unknown)}"
            yield problem(
                f"{name} {version} is installed, which this kvcustody does not know",
                f"install `{bounds}`, or a kvcustody that knows this release",
            )
    if not versions:
        yield skipped("no engine is installed here")


def install_command(extra: str) -> str:
    """Return the command that completes this installation: pip takes what the extra lacks, and kvcustody as it is."""
    return f"pip install 'kvcustody[{extra}]'"


def _optional() -> Iterator[tuple[str, str, str]]:
    """Yield each optional package: its name, its extra, and its version requirement."""
    for text in metadata.requires("kvcustody") or ():
        parts = _OPTIONAL.fullmatch(text)
        if parts is not None:
            yield parts["name"], parts["extra"], parts["bounds"]


def _version(name: str) -> str | None:
    for distribution in filter(None, (name, _ALSO.get(name))):
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(distribution)
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:2])


def _text(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


@worker_check("scrub-tuning", "the file of scrub tuning can be read")
def scrub_tuning(_subject: Examined, worker: Settings) -> Iterator[Diagnosis]:
    """Check for stored scrub tuning: without it the device is measured again at each start."""
    path = worker.scrub_tuning_path
    if not path.exists():
        yield skipped("there is none: it is created on a machine with a GPU")
        return
    if find_spec("torch") is None:
        yield skipped("torch is not installed")
        return
    from kvcustody.kernels.tuning import load

    if not load(path):
        yield warning(
            f"`{path}` holds no tuning of this version",
            "remove it: the next start measures this device again",
        )
