"""Whether what connectors beside ours copy rests in clear: asked of the server that takes it, again and again."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcustody.clock import VirtualClock
from kvcustody.governance.keys.root_key_wrapping import open_wrapping
from kvcustody.governance.keys.shred_keys import ShredKeys
from kvcustody.governance.tiers.seal.seal_notice import SealNotice
from kvcustody.integrations.vllm.foreign_connectors import CopiesBeside

SECOND = 1_000_000


def beside(*children: dict[str, Any]) -> Any:
    """vLLM's configuration of these connectors beside ours."""
    extra = {"connectors": [{"kv_connector": "KVCustody"}, *children]}
    transfer = SimpleNamespace(kv_connector="MultiConnector", kv_connector_extra_config=extra)
    return SimpleNamespace(kv_transfer_config=transfer)


def lmcache(port: int, host: str = "tcp://127.0.0.1") -> dict[str, Any]:
    where = {"lmcache.mp.host": host, "lmcache.mp.port": port}
    return {"kv_connector": "LMCacheMPConnector", "kv_connector_extra_config": where}


def test_a_server_is_asked_again_while_it_serves(tmp_path: Path) -> None:
    clock = VirtualClock()
    shred = ShredKeys.open(tmp_path / "shred", open_wrapping("generated", tmp_path / "root.key"), clock)
    salts = tmp_path / "salts"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        notice = SealNotice(salts, shred, port)
        copies = CopiesBeside(beside(lmcache(port)), salts, shred, clock)
        assert copies()
        notice.close()  # another server is in its place
        assert copies(), "not asked for every request"
        clock.advance(SECOND)
        assert not copies() and f"port {port}" in copies.clear
        again = SealNotice(salts, shred, port)
        clock.advance(SECOND)
        assert copies()
        again.close()
    clock.advance(SECOND)
    assert copies(), "nobody is there to take a copy"
    shred.close()


@pytest.mark.parametrize(
    "child",
    [
        {"kv_connector": "ExampleConnector"},
        {"kv_connector": "OffloadingConnector"},
        lmcache(1, "tcp://lmcache.example"),
    ],
    ids=["example", "offloading", "another machine"],
)
def test_who_shows_nothing_keeps_it_in_clear(tmp_path: Path, child: dict[str, Any]) -> None:
    clock = VirtualClock()
    shred = ShredKeys.open(tmp_path / "shred", open_wrapping("generated", tmp_path / "root.key"), clock)
    notice = SealNotice(tmp_path / "salts", shred, 1)
    for children in ((child,), (lmcache(1), child)):
        copies = CopiesBeside(beside(*children), tmp_path / "salts", shred, clock)
        assert not copies() and child["kv_connector"] in copies.clear
    assert CopiesBeside(beside(lmcache(1)), tmp_path / "salts", shred, clock)(), "control: it shows that it seals"
    assert not CopiesBeside(beside(child), None, shred, clock)(), "no salts, no notice"
    notice.close()
    shred.close()
