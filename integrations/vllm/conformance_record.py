"""A passed run of the kit as a file for a setting: the tested class, its code, and the cases.

1. A record is for one class, of one version of its distribution, with the bytes of its module. Another release, or a
   changed file, has no record.
2. It counts only if every case of the kit that reads it was run. Each must have passed, or have been skipped for a
   feature that the engine lacks. A component that keeps blocks elsewhere is tested as a tier: cases of the tier may not
   be skipped.
3. The setting names the record's own digest, so a record that was edited afterwards is another one. Only somebody who
   may change the setting decides.

The kit itself is another distribution (`kvcustody.testkit`), which a serving engine does not need. The cases that it
must have run are listed here. The kit's tests check that this list equals its cases.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib
import inspect
import json
from dataclasses import asdict, dataclass
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

from kvcustody.errors import ConfigError

SCHEMA = "kvcustody/conformance-record@1"
PASS, FAIL, SKIP = "pass", "fail", "skip"
CASES = (  # of the kit, in its order
    "scope/look-up",
    "scope/salt",
    "scope/epochs",
    "scope/attach",
    "scope/store",
    "scope/prefetch",
    "scope/evict",
    "scope/fork",
    "scope/preempt-resume",
    "residue/first-write",
    "residue/shards",
    "residue/in-time",
    "residue/interrupted",
    "residue/in-flight",
    "residue/transfers",
    "residue/stuck",
    "time/idle",
    "time/late-sweep",
    "time/late-sweep-many",
    "time/ceiling",
    "time/ceiling-running",
    "time/tier",
    "time/foreign-renewal",
    "time/never-cached",
    "erase/cached",
    "erase/running",
    "erase/tier",
    "policy/revocation",
    "policy/shorter",
    "lifecycle/any-order",
    "lifecycle/stale-handle",
    "lifecycle/stale-preemption",
    "lifecycle/one-holder",
    "lifecycle/computed-only",
    "lifecycle/aborted-prefill",
    "events/truth",
    "events/scope",
    "ledger/complete",
    "ledger/coverage",
    "ledger/verified",
    "identity/missing",
    "identity/forged",
    "identity/expired",
    "identity/replayed",
    "quota/waits-alone",
    "worlds/foreign-tenant",
    "fuzz/trace",
    "fuzz/in-flight",
    "fuzz/tier",
)
CASES_OF_THE_TIER = (  # which may not be skipped
    "scope/store",
    "scope/prefetch",
    "residue/transfers",
    "time/tier",
    "erase/tier",
    "fuzz/tier",
)


@dataclass(frozen=True, slots=True)
class Subject:
    """The tested code: `module:Class`, its distribution and version, and SHA-256 of the module's source file."""

    name: str
    distribution: str
    version: str
    source_sha256: str


def subject_of(tested: type) -> Subject:
    """Return a class's identity (rule 1).

    Raises:
        ConfigError: it has no source file.
    """
    module = tested.__module__
    try:
        source = Path(inspect.getfile(tested)).read_bytes()
    except (TypeError, OSError) as error:
        raise ConfigError(f"class `{module}:{tested.__qualname__}` has no source file: {error}") from error
    names = packages_distributions().get(module.partition(".")[0], [])
    distribution = sorted(names)[0] if names else ""
    digest = hashlib.sha256(source).hexdigest()
    return Subject(
        f"{module}:{tested.__qualname__}",
        distribution,
        version(distribution) if distribution else "",
        digest,
    )


def load_subject(name: str) -> type:
    """Return the class at `module:Class`.

    Raises:
        ConfigError: there is none.
    """
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"`{name}` is no `module:Class` here: {error}", subject=name) from error
    if not isinstance(found, type):
        raise ConfigError(f"`{name}` is not a class", subject=name)
    return found


def digest_of(data: bytes) -> str:
    """Return the digest that a setting names."""
    return hashlib.sha256(data).hexdigest()


def check_record(path: str, digest: str, tested: type) -> None:
    """Raise `ConfigError` with the reason why the record at `path` does not vouch for `tested` (rules 1–3)."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"conformance record `{path}`: {error.strerror}", path=path) from error
    if not hmac.compare_digest(digest_of(data), digest.lower()):
        raise ConfigError(
            f"conformance record `{path}` has digest `{digest_of(data)}`, the setting names `{digest}`: the "
            "record is from another run; review it and set its digest",
            path=path,
        )
    try:
        body = json.loads(data)
        theirs, cases = body["subject"], body["cases"]
        fine = body["schema"] == SCHEMA and isinstance(cases, dict)
    except (ValueError, KeyError, TypeError, RecursionError):
        fine = False
    if not fine:
        raise ConfigError(f"`{path}` is no `{SCHEMA}`; make one with `--record`", path=path)
    _check_subject(path, theirs, subject_of(tested))
    _check_cases(path, cases)


def _check_subject(path: str, theirs: Any, found: Subject) -> None:
    for field, value in asdict(found).items():
        recorded = theirs.get(field) if isinstance(theirs, dict) else None
        if recorded != value:
            raise ConfigError(
                f"conformance record `{path}` is of {field} `{recorded}`, here is `{value}`: run the kit on this one",
                path=path,
                field=field,
            )


def _check_cases(path: str, verdicts: dict[str, Any]) -> None:
    failed = sorted(name for name, verdict in verdicts.items() if verdict == FAIL)
    missing = [name for name in CASES if name not in verdicts]
    skipped = [name for name in CASES_OF_THE_TIER if verdicts.get(name) != PASS]
    for what, names in (
        ("failed", failed),
        ("did not run", missing),
        ("did not pass, and are of the tier", skipped),
    ):
        if names:
            raise ConfigError(
                f"conformance record `{path}`: {len(names)} cases {what}, `{names[0]}` first; the record "
                "cannot be used",
                path=path,
                cases=names,
            )
