"""PostgreSQL's rows by tenant behind the queries: every operation with its own row filter taken away on purpose."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from kvcustody.audit.evidence.copies.copy_coverage import copy_coverage
from kvcustody.audit.evidence.copies.transfers import transfers
from kvcustody.audit.evidence.counters.judge_hours import judge
from kvcustody.audit.evidence.coverage import summary as coverage_module
from kvcustody.audit.evidence.processes.work_periods import read_work_periods
from kvcustody.audit.kinds import TransferDecided
from kvcustody.errors import LedgerError
from kvcustody.governance.api.operations import audit as audit_api
from kvcustody.governance.api.operations import custody as custody_api
from kvcustody.governance.api.operations import erasures as erasures_api
from kvcustody.governance.api.operations import event_stream as stream_api
from kvcustody.governance.api.operations import tiers as tiers_api
from kvcustody.governance.tiers.copy_event import CopyEvent
from kvcustody.governance.tiers.copy_leaves import copy_leaves
from standins.postgres import walled_ledger
from standins.service.service_world import OFFSET_US, Worker, register, ship

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"  # of requests of both tenants
FORGETFUL: dict[str, tuple[Any, str, Any]] = {}  # by path: what to replace, and by what


def _forgets(path: str, module: Any, name: str, made: Callable[..., Any]) -> None:
    FORGETFUL[path] = (module, name, made)


def _without(function: Callable[..., Any], argument: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*given: Any, **named: Any) -> Any:
        return function(*given, **{**named, argument: None})

    return called


for _asked in ("limit=1000", f"limit=1000&trace={TRACE}"):
    _forgets(f"/v1/audit/events?{_asked}", audit_api, "EventFilter", _without(audit_api.EventFilter, "logs"))
_forgets(
    "/v1/audit/stream?shape=leaf&limit=1000",
    stream_api,
    "read_in_commit_order",
    _without(stream_api.read_in_commit_order, "log"),
)
_forgets("/v1/custody/live", custody_api, "live_residencies", _without(custody_api.live_residencies, "tenant"))
_forgets("/v1/custody/coverage?since=1", custody_api, "coverage", _without(coverage_module.coverage, "tenant"))
_forgets(
    "/v1/custody/coverage?since=1&tier=nvme",
    custody_api,
    "copy_coverage",
    lambda connection, chosen, **how: copy_coverage(connection, chosen._replace(tenant=None), **how),
)
_forgets(
    "/v1/tiers?since=1&until=9000000000000000",
    tiers_api,
    "tier_summaries",
    _without(tiers_api.tier_summaries, "tenant"),
)
_forgets(
    "/v1/tiers/transfers",
    tiers_api,
    "transfers",
    lambda connection, wanted, **how: transfers(connection, wanted._replace(tenant=None), **how),
)
_forgets(
    "/v1/tiers/requests?residency=2",
    tiers_api,
    "explain_request",
    _without(tiers_api.explain_request, "tenant"),
)
_forgets("/v1/erasures", erasures_api.ledger, "requests", _without(erasures_api.ledger.requests, "tenant"))
_forgets("/v1/audit/logs", audit_api, "log_of", lambda tenant: _Everything())
for _path, _name in (
    ("/v1/custody/totals", "tenant_totals"),
    ("/v1/custody/coverage/hours", "by_hour"),
    ("/v1/audit/counts", "event_counts"),
):
    _forgets(_path, custody_api, _name, _without(getattr(custody_api, _name), "tenant"))


class _Everything(str):
    """A name that equals every other."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = str.__hash__


class Opened(NamedTuple):
    service: Any
    people: Any
    client: Any


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    with walled_ledger() as url:
        yield url


@pytest.fixture(scope="module")
def opened(database: str, tmp_path_factory, opened_in, make_client, make_people) -> Opened:
    folder = tmp_path_factory.mktemp("walls")
    service = opened_in(folder, database_url=database, subject_keys_url=f"sqlite:///{folder}/people.db")
    assert service.row_walls
    opened = Opened(service, make_people(service), make_client(service))
    worker, key = Worker(), opened.people["worker"]
    register(opened.client, key, worker)
    events = [worker.started(), *worker.request("acme"), *worker.request("labs"), *worker.request("labs")]
    events += [worker.request("acme")[0], worker.request("labs")[0]]  # these run
    name = bytes(range(32))
    for tenant in ("acme", "labs"):
        told = [("stored", 1, ""), ("ended", 9, "ceiling"), ("destroyed", 9, "unlinked")]
        number = 1 if tenant == "acme" else 2
        copies = [CopyEvent(step, name, number, tenant, "low", 4, 100, at, 9, why) for step, at, why in told]
        events += copy_leaves("nvme", copies)
        told_why = ("recompute", "", 0, f"{tenant} waits for nobody")
        events.append(TransferDecided(9, "restore", "nvme", tenant, number, 4, 100, 20, 10, *told_why))
    left = CopyEvent("destroyed", name, 0, "", "", 0, 100, 9, 0, "unlinked")
    events += copy_leaves("nvme", [left])
    traced = [event._replace(trace=TRACE) if "trace" in event.__struct_fields__ else event for event in events]
    assert ship(opened.client, key, worker, worker.batch(traced)).status_code == 200
    assert service.writer.seal()  # verdicts are of the newest checkpoint
    service.figures.close()  # by the clock of this machine nothing of it was due lately
    assert judge(service.reader, service.engine, now_us=OFFSET_US + 60_000_000) is not None
    for tenant in ("acme", "labs"):
        body = {"tenant": tenant, "subject": "user-1"}
        opened.client("POST", "/v1/erasures", opened.people["dpo"], json=body)
    return opened


@pytest.fixture(scope="module")
def viewer(opened: Opened) -> str:
    return opened.people["tenant-viewer@acme"]


@pytest.mark.system("the wall between tenants' rows changes an answer")
def test_answers_are_the_same_with_and_without_the_wall(opened: Opened, viewer: str, monkeypatch) -> None:
    """The wall takes nothing from a tenant that is its own."""
    erasure = opened.client("GET", "/v1/erasures", viewer).json()["items"][0]["erasure"]
    paths = [path for path in FORGETFUL if "/live" not in path and "coverage" not in path] + [
        "/v1/custody/residencies?subject=user-1",
        "/v1/custody/subject?subject=user-1&at=5",
        "/v1/custody/coverage?since=1&until=9000000000000000",
        "/v1/custody/denials",
        "/v1/custody/reuse",
        "/v1/orphans/findings",
        "/v1/audit/proofs/inclusion?log=tenant/acme&idx=0&as_of=1",
        "/v1/audit/proofs/consistency?log=tenant/acme&old_size=1&size=2",
        "/v1/audit/tiles/0/0?log=tenant/acme&width=2",
        "/v1/audit/tiles/0/0?log=root&width=2",
        f"/v1/erasures/{erasure}",
    ]
    for path in paths:  # what reading itself puts on record is there for both
        opened.client("GET", path, viewer)
    seen = []
    for wall in (True, False):
        monkeypatch.setattr(opened.service, "row_walls", wall)
        answers = [opened.client("GET", path, viewer) for path in paths]
        seen.append([(answer.status_code, _plain(answer)) for answer in answers])
    for path, behind, open_ in zip(paths, *seen, strict=True):
        assert behind == open_, path
        assert behind[0] == 200 or "as_of" in path, (path, behind)


def _plain(answer: Any) -> Any:
    if answer.headers["content-type"] != "application/json":
        return answer.content
    found = answer.json()
    found.pop("next", None)
    return found


@pytest.mark.parametrize("path", sorted(FORGETFUL))
def test_a_forgotten_filter_shows_nothing_foreign(opened: Opened, viewer: str, path: str, monkeypatch) -> None:
    honest = opened.client("GET", path, viewer)
    assert honest.status_code == 200 and "labs" not in honest.text
    module, name, made = FORGETFUL[path]
    monkeypatch.setattr(module, name, made)
    behind = opened.client("GET", path, viewer)
    assert behind.status_code == 200, behind.text
    monkeypatch.setattr(opened.service, "row_walls", False)
    leaking = opened.client("GET", path, viewer)
    assert leaking.status_code == 200
    if path == "/v1/custody/totals":  # this one forgets by giving others' rows its own name
        assert (len(behind.json()["items"]), len(leaking.json()["items"])) == (1, 2)
        return
    assert "labs" not in behind.text
    assert json.dumps(leaking.json()).count("labs") > 0, "control: without the wall the foreign rows show"


def test_the_wall_ends_with_the_transaction(opened: Opened) -> None:
    with opened.service.reading("acme") as connection:
        assert connection.exec_driver_sql("SELECT current_user").scalar() == "kvcustody_reader"
        names = connection.exec_driver_sql("SELECT name FROM logs").scalars().all()
        assert names == ["tenant/acme"]
    with opened.service.reading() as connection:
        assert connection.exec_driver_sql("SELECT current_user").scalar() != "kvcustody_reader"
        assert not connection.exec_driver_sql("SELECT current_setting('kvcustody.tenant', true)").scalar()
        assert len(connection.exec_driver_sql("SELECT name FROM logs").scalars().all()) >= 3


def test_behind_the_wall_nobody_seems_to_owe_nothing(opened: Opened) -> None:
    """Who owes an answer is in the system log, which the wall hides: asked there, it is refused, never empty."""
    assert opened.service.work_periods(), "control: without the wall somebody was at work"
    with opened.service.reading("acme") as connection, pytest.raises(LedgerError, match="the system log records"):
        read_work_periods(connection)
