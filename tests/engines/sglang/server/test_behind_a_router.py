"""Two governed SGLang servers behind a real router (SMG), with the door before it."""

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
from standins.engines.sglang.sglang_server import SglangServer
from standins.engines.vllm.deployment import Deployment

__all__ = [
    "test_a_foreign_tenant_finds_nothing_whatever_it_sends",
    "test_a_worker_takes_nobody_without_a_token_of_the_door",
    "test_ones_own_conversation_returns_to_its_cache",
    "test_where_a_worker_dies_the_other_serves",
]


@pytest.fixture(scope="module")
def edge(model, new_deployment, tmp_path_factory) -> Iterator[Edge]:
    folder = tmp_path_factory.mktemp("edge")

    def start(stack: contextlib.ExitStack, deployments: list[Deployment]) -> list[SglangServer]:
        servers = []
        for one in deployments:
            servers.append(SglangServer(model, folder, deployment=one))
            stack.callback(servers[-1].stop)
        return servers

    paths = "/health, /health_generate, /get_model_info, /model_info, /get_server_info, /server_info, /v1/models"
    with opened(new_deployment, folder, start, paths) as found:
        yield found
