"""A control plane at an address, for tests of who takes erase epochs from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvcustody.governance.service.service import Service
from standins.service.epoch_fleet import Fleet, serve


@pytest.fixture
def fleet(make_service: Callable[..., Service], make_client: Any, make_people: Any) -> Iterator[Fleet]:
    service = make_service()
    made = serve(service, make_client(service), make_people(service))
    yield made
    service.stopping.set()
    made.server.close()
