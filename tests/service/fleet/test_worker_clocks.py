"""A worker whose clock is far from the service's is not put on record, and leaves dated ahead wait: nothing is lost."""

from __future__ import annotations

import itertools
import uuid
from typing import Any

import pytest

from kvcustody.audit.leaf import Context
from kvcustody.clock import MICROSECONDS, SystemClock
from kvcustody.errors import ServiceError
from kvcustody.governance.control_plane.connection import is_away
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.governance.service.service import Service
from standins.service.service_world import MEDIA, Worker

BOUND = 300 * MICROSECONDS
_lives = (uuid.uuid4().hex for _ in itertools.count())


def register(service: Service, apart_us: int, *, told: bool = True) -> bool:
    """A process of a worker whose clock is so far from the service's."""
    clock = SystemClock()
    utc_us = clock.utc_us() + apart_us
    offset_us = utc_us - clock.now_us()
    return service.fleet.register("gpu-0", next(_lives), offset_us, utc_us if told else None)


@pytest.mark.parametrize("apart_us", [-BOUND - 5 * MICROSECONDS, BOUND + 5 * MICROSECONDS, 365 * 86_400 * MICROSECONDS])
def test_a_clock_that_is_too_far_is_refused_with_how_far_and_what_to_do(service: Service, apart_us: int) -> None:
    with pytest.raises(ProblemError) as refused:
        register(service, apart_us)
    said = str(refused.value.detail)
    assert refused.value.type.name == "conflict" and "worker_clock_seconds" in said and "NTP" in said
    assert ("ahead of" if apart_us > 0 else "behind") in said and "over 300 s" in said


@pytest.mark.parametrize("apart_us", [0, -BOUND + 5 * MICROSECONDS, BOUND - 5 * MICROSECONDS])
def test_control_one_within_the_bound_is_put_on_record(service: Service, apart_us: int) -> None:
    assert register(service, apart_us)


def test_a_process_that_has_ended_says_no_time_and_is_put_on_record_for_its_spill(service: Service) -> None:
    assert register(service, -86_400 * MICROSECONDS, told=False)


@pytest.mark.parametrize(("ahead_s", "taken"), [(3600, False), (200, True)], ids=["ahead", "control"])
def test_leaves_dated_ahead_are_not_taken_and_wait_in_the_workers_spill(
    client: Any, people: Any, ahead_s: int, taken: bool
) -> None:
    worker, key = Worker(), people["worker"]
    offset_us = SystemClock().utc_us() + ahead_s * MICROSECONDS - worker.now_us
    worker.context = Context(worker.incarnation, offset_us, worker.directory)
    assert client("PUT", worker.path, key, json={"offset_us": offset_us}).status_code == 200
    batch = worker.batch(worker.request("acme"))
    path = f"{worker.path}/batches/{batch.first}"
    answer = client("PUT", path, key, content=batch.body, headers=MEDIA)
    assert answer.status_code == (200 if taken else 503), answer.text
    if not taken:
        assert "ahead of this service's clock" in answer.json()["detail"]
        refused = ServiceError("", problem="unavailable", status=answer.status_code)
        assert is_away(refused), "a worker spills what is not taken, and tries again"
