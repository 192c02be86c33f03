"""A governed HTTP server that could not serve is refused before its engine starts; other servers are left alone."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvcustody.errors import ConfigError
from kvcustody.integrations.sglang import plugin

PLACE = "sglang.srt.entrypoints.engine.Engine._launch_subprocesses"


def launch(**options: Any) -> str:
    """SGLang's launch as the plugin has it, for a server with these options."""
    kind, hook = plugin.HOOKS[PLACE]
    assert kind == "AROUND"
    found: str = hook(lambda *given, **named: "launched", object, server_args=SimpleNamespace(**options))
    return found


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[type]:
    """SGLang's server module, as far as the plugin asks for it: what was put before its application."""
    added: list[type] = []
    made = ModuleType(plugin._SERVER)
    made.app = SimpleNamespace(add_middleware=added.append)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, plugin._SERVER, made)
    document = tmp_path / "identity.yaml"
    document.write_text("schema: kvcustody/identity@1\napi_keys: {path: keys.yaml}\n")
    monkeypatch.setenv("KVCUSTODY_IDENTITY_PATH", str(document))
    return added


def test_a_server_that_can_serve_gets_the_door(server: list[type]) -> None:
    assert launch(radix_cache_backend="kvcustody", skip_server_warmup=True) == "launched"
    assert [each.__name__ for each in server] == ["SglangScopeMiddleware"]


def test_a_server_that_would_ask_itself_does_not_start(server: list[type]) -> None:
    with pytest.raises(ConfigError, match="`--skip-server-warmup`"):
        launch(radix_cache_backend="kvcustody", skip_server_warmup=False)
    assert server == []


def test_a_server_without_an_identity_document_does_not_start(
    server: list[type], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCUSTODY_IDENTITY_PATH", "/nonexistent/identity.yaml")
    with pytest.raises(ConfigError, match="the setting `identity_path` names it"):
        launch(radix_cache_backend="kvcustody", skip_server_warmup=True)
    assert server == []


def test_a_server_of_another_cache_and_an_engine_without_one_are_left_alone(
    server: list[type], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launch(radix_cache_backend=None, skip_server_warmup=False) == "launched" and server == []
    monkeypatch.delitem(sys.modules, plugin._SERVER)
    assert launch(radix_cache_backend="kvcustody", skip_server_warmup=False) == "launched"
