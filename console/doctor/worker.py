"""Checks of a worker's settings: its keys, its policy, its clock, its tiers and its control plane."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from kvcustody.audit.store.database.database_place import SqliteFile, database_place
from kvcustody.console.doctor.findings import (
    AnySettings,
    Diagnosis,
    Examined,
    open_to_others,
    problem,
    settings_check,
    skipped,
    warning,
    worker_check,
)
from kvcustody.deadline_clock import TimeFloor, read_floor
from kvcustody.governance.control_plane.connection import ControlPlaneConnection, read_key_file
from kvcustody.governance.keys.root_key_wrapping import read_private
from kvcustody.governance.release.startup_policy import startup_policy_of_file
from kvcustody.governance.settings import Settings
from kvcustody.times import SECOND_US

_ANSWER_SECONDS = 5.0  # for a part of an answer


@worker_check("keys", "the worker's keys exist, and others cannot access them")
def keys(_subject: Examined, worker: Settings) -> Iterator[Diagnosis]:
    """Check the root key, the keyring, the key of scope tokens and the shred keys."""
    if worker.root_key_source == "file" and not worker.root_key_path.exists():
        yield problem(f"root key `{worker.root_key_path}` does not exist", "create it with `kvcustody keys init`")
    for key_path in (worker.root_key_path, worker.scope_token_key_path):
        read_private(key_path)
    for path in (worker.keyring_path, worker.shred_keys_path, worker.remote_tier_secret_path):
        if path is not None and path.exists():
            yield from open_to_others(path)
    if worker.keyring_path.exists() and worker.root_key_source == "generated" and not worker.root_key_path.exists():
        yield problem(
            f"keyring `{worker.keyring_path}` exists, but not its root key `{worker.root_key_path}` is not",
            "restore the root key: a new one opens nothing of this keyring",
        )


@settings_check("subject-keys", "subjects' names can be sealed and opened again")
def subject_keys(subject: Examined, given: AnySettings) -> Iterator[Diagnosis]:
    """Check the subject keys' store: a ledger on a server needs a separate one."""
    for settings in given:
        place = database_place(settings.database_url)
        behind = subject.worker is settings and subject.worker.control_plane
        if settings.subject_names == "clear":
            yield warning(
                "names of subjects stand in the ledger and in every backup of it (`subject_names: clear`)",
                "use `sealed`, with a store of subject keys, to be able to unlink a subject",
            )
        elif settings.subject_keys_url is None and not isinstance(place, SqliteFile) and not behind:
            yield problem(
                "the ledger is on a server, and no store of subject keys is named",
                "set `subject_keys_url`, the same for every process of this ledger",
            )


@worker_check("policy", "the policy can be compiled for this worker's profile")
def policy(subject: Examined, worker: Settings) -> Iterator[Diagnosis]:
    """Check the policy that a worker would start with; a released policy's signatures are checked when it is read."""
    if worker.policy_release:
        yield skipped(f"it comes from `{worker.policy_release}`")
    elif not worker.policy_path.exists():
        yield problem(f"policy `{worker.policy_path}` does not exist", "write one with `kvcustody policy init`")
    else:
        startup_policy_of_file(worker, subject.clock)


@settings_check("deadline-clock", "deadlines run by the wall clock")
def deadline_clock(subject: Examined, given: AnySettings) -> Iterator[Diagnosis]:
    """Check the deadline clock: a wall clock beyond its floor's limit is in doubt, and one behind is not followed."""
    for path in dict.fromkeys(settings.clock_file for settings in given):
        floor = read_floor(path)
        if floor is not None:
            yield from _of_floor(path, floor, subject)


def _of_floor(path: Path, floor: TimeFloor, subject: Examined) -> Iterator[Diagnosis]:
    now_us = subject.clock.utc_us()
    since_us = subject.clock.now_us() - floor.boot_us if floor.boot == subject.clock.boot else 0
    if floor.utc_us + since_us - now_us > SECOND_US:
        behind = (floor.utc_us + since_us - now_us) // SECOND_US
        yield problem(f"the wall clock is {behind} s behind the time that deadlines know (`{path}`)", "set it right")
    elif floor.boot == subject.clock.boot and now_us > floor.limit_us + since_us:
        yield problem(
            f"the wall clock is in doubt: it stepped ahead by more than is allowed (`{path}`)",
            "correct it, or confirm it with `kvcustody clock confirm`",
        )


@worker_check("tiers", "tiers have space, and others cannot access them")
def tiers(_subject: Examined, worker: Settings) -> Iterator[Diagnosis]:
    """Check the tiers' folders: each belongs to one worker."""
    path = worker.nvme_tier_path
    if path is None and worker.nvme_tier_bytes:
        yield problem("`nvme_tier_bytes` is set, but not `nvme_tier_path`: the tier does not exist", "set both")
    if worker.remote_tier_bytes and not worker.remote_tier_url:
        yield problem("`remote_tier_bytes` is set, but not `remote_tier_url`: the tier does not exist", "set both")
    if path is not None and path.exists():
        yield from open_to_others(path, "chmod 700 it")
        held = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        if shutil.disk_usage(path).free + held < worker.nvme_tier_bytes:
            yield warning(
                f"`{path}` may hold {worker.nvme_tier_bytes.human_readable()}, more than its disk has",
                "make room, or lower `nvme_tier_bytes`",
            )


@worker_check("control-plane", "the control plane answers, and accepts the worker's key")
def control_plane(_subject: Examined, worker: Settings) -> Iterator[Diagnosis]:
    """Check the control plane with one request and the worker's own key."""
    if worker.control_plane_key_path is None:
        yield skipped("the settings name none (`control_plane`)")
        return
    key = read_key_file(worker.control_plane_key_path)
    with ControlPlaneConnection(
        worker.control_plane,
        key,
        authority=worker.control_plane_ca_path,
        certificate=worker.control_plane_certificate_path,
        certificate_key=worker.control_plane_certificate_key_path,
        timeout_seconds=_ANSWER_SECONDS,
    ) as connection:
        connection.request("GET", "/v1/whoami", within_seconds=_ANSWER_SECONDS)
