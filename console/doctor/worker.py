"""Checks of a worker's settings: its keys, its policy, its clock, its tiers and its control plane."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from kvcustody.audit.store.database.database_place import SqliteFile, database_place
from kvcustody.console.doctor.findings import Diagnosis, Examined, check, problem, skipped, warning
from kvcustody.deadline_clock import TimeFloor, read_floor
from kvcustody.governance.control_plane.connection import ControlPlaneConnection, read_key_file
from kvcustody.governance.keys.root_key_wrapping import read_private
from kvcustody.governance.release.startup_policy import startup_policy_of_file
from kvcustody.times import SECOND_US

_ANSWER_SECONDS = 5.0  # for a part of an answer
_NO_WORKER = "no worker's settings were given (`--worker`)"


@check("keys", "the worker's keys are there, and closed to others")
def keys(subject: Examined) -> Iterator[Diagnosis]:
    """The root key, the keyring, the key of scope tokens, the shred keys."""
    worker = subject.worker
    if worker is None:
        yield skipped(_NO_WORKER)
        return
    if worker.root_key_source == "file" and not worker.root_key_path.exists():
        yield problem(
            f"root key `{worker.root_key_path}` does not exist", "create it with `kvcustody keys init`"
        )
    for key_path in (worker.root_key_path, worker.scope_token_key_path):
        read_private(key_path)
    for path in (worker.keyring_path, worker.shred_keys_path, worker.remote_tier_secret_path):
        if path is not None and path.exists() and (mode := stat.S_IMODE(path.stat().st_mode)) & 0o077:
            yield problem(f"`{path}` has mode `{mode:04o}`, open to others", "chmod 600 it")
    if (
        worker.keyring_path.exists()
        and worker.root_key_source == "generated"
        and not worker.root_key_path.exists()
    ):
        yield problem(
            f"keyring `{worker.keyring_path}` is there, and its root key `{worker.root_key_path}` is not",
            "restore the root key: a new one opens nothing of this keyring",
        )


@check("subject-keys", "names of subjects can be sealed, and opened again")
def subject_keys(subject: Examined) -> Iterator[Diagnosis]:
    """A ledger on a server needs a store of its own for these keys."""
    if not subject.settings:
        yield skipped("no settings were given (`--service`, `--worker`)")
    for each in subject.settings:
        place = database_place(each.database_url)
        behind = subject.worker is each and subject.worker.control_plane
        if each.subject_names == "clear":
            yield warning(
                "names of subjects stand in the ledger and in every backup of it (`subject_names: clear`)",
                "use `sealed`, with a store of subject keys, to be able to unlink a subject",
            )
        elif each.subject_keys_url is None and not isinstance(place, SqliteFile) and not behind:
            yield problem(
                "the ledger is on a server, and no store of subject keys is named",
                "set `subject_keys_url`, the same for every process of this ledger",
            )


@check("policy", "the policy can be compiled for this worker's profile")
def policy(subject: Examined) -> Iterator[Diagnosis]:
    """What a worker would start with; a released policy is checked by its signatures when it is read."""
    worker = subject.worker
    if worker is None:
        yield skipped(_NO_WORKER)
    elif worker.policy_release:
        yield skipped(f"it comes from `{worker.policy_release}`")
    elif not worker.policy_path.exists():
        yield problem(
            f"policy `{worker.policy_path}` does not exist", "write one with `kvcustody policy init`"
        )
    else:
        startup_policy_of_file(worker, subject.clock)


@check("deadline-clock", "deadlines run by the wall clock")
def deadline_clock(subject: Examined) -> Iterator[Diagnosis]:
    """A wall clock that is ahead of its floor's limit is in doubt; one that is behind is not followed."""
    if not subject.settings:
        yield skipped("no settings were given (`--service`, `--worker`)")
    for path in dict.fromkeys(each.clock_file for each in subject.settings):
        floor = read_floor(path)
        if floor is not None:
            yield from _of_floor(path, floor, subject)


def _of_floor(path: Path, floor: TimeFloor, subject: Examined) -> Iterator[Diagnosis]:
    now_us = subject.clock.utc_us()
    since_us = subject.clock.now_us() - floor.boot_us if floor.boot == subject.clock.boot else 0
    if floor.utc_us + since_us - now_us > SECOND_US:
        behind = (floor.utc_us + since_us - now_us) // SECOND_US
        yield problem(
            f"the wall clock is {behind} s behind the time that deadlines know (`{path}`)", "set it right"
        )
    elif floor.boot == subject.clock.boot and now_us > floor.limit_us + since_us:
        yield problem(
            f"the wall clock is in doubt: it stepped ahead by more than is allowed (`{path}`)",
            "set it right, or confirm it with `kvcustody clock confirm`",
        )


@check("tiers", "tiers have room, and are closed to others")
def tiers(subject: Examined) -> Iterator[Diagnosis]:
    """A tier's folder is the worker's own."""
    worker = subject.worker
    if worker is None:
        yield skipped(_NO_WORKER)
        return
    path = worker.nvme_tier_path
    if path is None and worker.nvme_tier_bytes:
        yield problem(
            "`nvme_tier_bytes` is set, and `nvme_tier_path` is not: there is no such tier", "set both"
        )
    if worker.remote_tier_bytes and not worker.remote_tier_url:
        yield problem(
            "`remote_tier_bytes` is set, and `remote_tier_url` is not: there is no such tier", "set both"
        )
    if path is not None and path.exists():
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            yield problem(f"`{path}` has mode `{mode:04o}`, open to others", "chmod 700 it")
        held = sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
        if shutil.disk_usage(path).free + held < worker.nvme_tier_bytes:
            yield warning(
                f"`{path}` may hold {worker.nvme_tier_bytes.human_readable()}, more than its disk has",
                "make room, or lower `nvme_tier_bytes`",
            )


@check("control-plane", "the control plane answers, and takes the worker's key")
def control_plane(subject: Examined) -> Iterator[Diagnosis]:
    """One request, with the worker's own key."""
    worker = subject.worker
    if worker is None or not worker.control_plane or worker.control_plane_key_path is None:
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
