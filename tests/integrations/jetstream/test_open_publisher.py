"""What the settings ask for: a publisher to NATS, or one beside a worker's own socket, which waits for nothing."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvcustody.governance.settings import Settings
from kvcustody.integrations.events.publisher import BothPublishers, EventPublisher, open_publisher
from kvcustody.integrations.jetstream.accounts import FleetKeys, credentials
from kvcustody.integrations.jetstream.publisher import StreamPublisher
from kvcustody.integrations.jetstream.subjects import worker_permissions
from standins.integrations.jetstream.told_world import ANN, epochs, store


@pytest.mark.parametrize("endpoint", ["", "tcp://127.0.0.1:0"])
def test_nats_that_is_away_is_not_waited_for(tmp_path: Path, endpoint: str) -> None:
    keys = FleetKeys.create(tmp_path / "keys")
    file = tmp_path / "gpu-1.creds"
    file.write_text(credentials(keys.fleet, "gpu-1", worker_permissions("gpu-1"), now=int(time.time()), seconds=60))
    settings = Settings(
        worker_name="gpu-1",
        control_plane=f"unix:{tmp_path}/api.sock",
        control_plane_key_path=tmp_path / "gpu-1.key",
        scope_token_key_path=tmp_path / "scope.key",
        nats="nats://127.0.0.1:9",
        nats_credentials_path=file,
        kv_events_endpoint=endpoint,
    )
    publisher = open_publisher(settings, revision=1)
    assert publisher is not None
    try:
        assert isinstance(publisher, BothPublishers if endpoint else StreamPublisher)
        streamed = publisher._both[1] if isinstance(publisher, BothPublishers) else publisher
        assert isinstance(streamed, StreamPublisher)
        publisher.take_epochs(epochs())
        publisher.publish([store(ANN, 0, 2)])
        if isinstance(publisher, BothPublishers):
            assert isinstance(publisher._both[0], EventPublisher)
            assert publisher._both[0].stats().next_sequence == 1
        assert not streamed.stats().is_connected
        said = publisher.figures()
        assert said["events_connected.nats"] == 0
        assert said.get("events_connected.socket") == (1 if endpoint else None)
    finally:
        publisher.close()
    assert streamed.stats().messages == 1, "it was told, and its number says so once NATS is there"
