"""Two governed vLLM servers behind a real router (SMG), with the door before it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from standins.engines.behind_a_router import (
    Edge,
    opened,
    test_a_foreign_tenant_finds_nothing_whatever_it_sends,
    test_a_worker_takes_nobody_without_a_token_of_the_door,
    test_ones_own_conversation_returns_to_its_cache,
    test_where_a_worker_dies_the_other_serves,
)
from standins.engines.vllm.deployment import Deployment
from standins.engines.vllm.http_server import HttpServer

__all__ = [
    "test_a_foreign_tenant_finds_nothing_whatever_it_sends",
    "test_a_worker_takes_nobody_without_a_token_of_the_door",
    "test_ones_own_conversation_returns_to_its_cache",
    "test_where_a_worker_dies_the_other_serves",
]


@pytest.fixture(scope="module")
def edge(model, site, new_deployment, tmp_path_factory) -> Iterator[Edge]:
    folder = tmp_path_factory.mktemp("edge")

    def start(stack: contextlib.ExitStack, deployments: list[Deployment]) -> list[HttpServer]:
        servers = [HttpServer(model, site, folder, deployment=one) for one in deployments]
        for server in servers:
            stack.callback(server.close)
        return [server.wait() for server in servers]

    with opened(new_deployment, folder, start, "/health, /ping, /version, /v1/models") as found:
        yield found
