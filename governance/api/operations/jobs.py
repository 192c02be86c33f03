"""Operations on jobs: export of the ledger; progress, result and files of every job.

1. A job is its principal's own. What an export holds is what its principal may see.
2. That something was taken out of the ledger is on record before it is (class A), whoever does it.
"""

from __future__ import annotations

import hashlib
import shutil
import tarfile
from functools import partial
from pathlib import Path as FilePath
from typing import Annotated, Any

from kvcustody.audit.exports.export_writer import ExportSelection, write_export
from kvcustody.audit.exports.file_formats import LeafFormat
from kvcustody.audit.exports.ledger_source import LedgerSource
from kvcustody.audit.kinds import AccessRecorded, log_of
from kvcustody.files import fresh_file
from kvcustody.governance.api.declarations import Declarations
from kvcustody.governance.api.given import CallerDep, ServiceDep
from kvcustody.governance.api.models.jobs import ExportRequest, JobModel, JobPage
from kvcustody.governance.service.access.roles import Permission
from kvcustody.governance.service.jobs import JobProgress, shown
from kvcustody.governance.service.operations.answer import FileContent
from kvcustody.governance.service.operations.operation import Operation
from kvcustody.governance.service.operations.parameters import Cursor, Limit, Path
from kvcustody.governance.service.page_cursor import CursorBinding
from kvcustody.governance.service.problem_details import ProblemError

READ = Permission.READ_CUSTODY
JobId = Annotated[str, Path(pattern=r"^[0-9a-f]{32}$", examples=["cd" * 16])]
FileName = Annotated[str, Path(pattern=r"^[a-z0-9][a-z0-9.-]{0,63}$", examples=["export.tar"])]
_mine = partial(Operation, action=READ, tag="jobs", also=(Permission.READ_OPERATIONS,))  # a job is its principal's own


def add_jobs(api: Declarations) -> None:
    """Declare the operations."""
    exporting = Operation(
        "exportLedger",
        "POST",
        "/v1/exports",
        READ,
        "jobs",
        keyed=True,
        exports=True,
        command="job export",
    )
    api.add(exporting, export, answers=JobModel, status=202, problems=("not-found",))
    api.add(
        _mine("listJobs", "GET", "/v1/jobs", command="job list"),
        jobs,
        answers=JobPage,
        problems=("cursor-invalid",),
    )
    api.add(
        _mine("getJob", "GET", "/v1/jobs/{job}", command="job show"),
        job_of,
        answers=JobModel,
        problems=("not-found",),
    )
    cancelling = _mine("cancelJob", "POST", "/v1/jobs/{job}/cancel", keyed=True, command="job cancel")
    api.add(cancelling, cancel, answers=JobModel, problems=("not-found",))
    reading = Operation(
        "getJobFile", "GET", "/v1/jobs/{job}/files/{name}", READ, "jobs", exports=True, command="job file"
    )
    api.add(reading, file_of, media="application/octet-stream", problems=("not-found",))


def export(caller: CallerDep, service: ServiceDep, what: ExportRequest) -> dict[str, Any]:
    """Export leaves with everything that is needed to verify them offline, as one tar file."""
    mine = service.tenant_of(caller, READ, what.tenant)
    if what.since is not None and what.until is not None and what.since >= what.until:
        raise ProblemError("invalid", "`since` must be before `until`")
    now_us, roles = service.clock.now_us(), tuple(sorted(caller.roles))
    service.record(AccessRecorded(now_us, caller.name, roles, "exportLedger", mine or ""))
    logs = () if mine is None else (log_of(mine),)
    selection = ExportSelection(logs, what.since, what.until)
    made_at_us = service.clock.utc_us()

    def work(progress: JobProgress) -> dict[str, Any]:
        if what.as_of is None:
            service.cover()
        source = LedgerSource(service.reader, as_of=what.as_of)
        folder = progress.folder / "export"
        export = write_export(
            folder,
            source,
            selection,
            form=LeafFormat(what.form),
            made_at_us=made_at_us,
            progress=lambda log, done, total: progress(done, total),
        )
        packed = _pack(folder)
        return {"leaves": export.leaves, "checkpoint": export.root.size, "files": [packed]}

    parameters = what.model_dump(exclude_none=True)
    return shown(
        service.jobs.start(
            "export", work, principal=caller.name, tenant=mine, parameters=parameters, party=caller.party
        )
    )


def jobs(caller: CallerDep, service: ServiceDep, cursor: Cursor = None, limit: Limit = 50) -> dict[str, Any]:
    """List your jobs, newest first."""
    question = CursorBinding("listJobs", caller.name, {})
    position = service.cursors.read(question, cursor)
    before = None if position is None else (int(position[0]), str(position[1]))
    found, more = service.jobs.listed(principal=caller.name, before=before, limit=limit)
    following = service.cursors.write(question, [found[-1].created_us, found[-1].job]) if more else None
    return {"items": [shown(service.verdicts.on(item)) for item in found], "next": following}


def job_of(caller: CallerDep, service: ServiceDep, job: JobId) -> dict[str, Any]:
    """Get one of your jobs."""
    return shown(service.verdicts.on(service.jobs.get(job, principal=caller.name)))


def cancel(caller: CallerDep, service: ServiceDep, job: JobId) -> dict[str, Any]:
    """Ask one of your jobs to stop; its files are removed."""
    return shown(service.jobs.cancel(job, principal=caller.name))


def file_of(caller: CallerDep, service: ServiceDep, job: JobId, name: FileName) -> FileContent:
    """Get a file of one of your jobs."""
    path = service.jobs.file(job, name, principal=caller.name)
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return FileContent(path, "application/octet-stream", headers)


def _pack(folder: FilePath) -> dict[str, Any]:
    """An export as one tar file, the folder gone; the same leaves give the same bytes."""
    path = folder.with_suffix(".tar")
    with (
        fresh_file(path) as file,
        tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive,
    ):
        for item in sorted(folder.rglob("*")):
            if item.is_file():
                info = tarfile.TarInfo(str(item.relative_to(folder.parent)))
                info.size, info.mode = item.stat().st_size, 0o600
                with item.open("rb") as content:
                    archive.addfile(info, content)
    shutil.rmtree(folder)
    with path.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": digest}
