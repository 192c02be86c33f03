"""The webhooks that a service pushes its ledger to: one thread each, for the life of the service.

1. Where a webhook goes and its key are settings: nobody makes a service send the ledger elsewhere over the API.
2. That a sink is detached, attached again, given its dead batches again, or that its losses were seen, is on record
   before it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import orjson
from sqlalchemy import Engine

from kvcustody.audit.evidence.query.events import EventRow
from kvcustody.audit.kinds import Event, SinkChanged
from kvcustody.audit.siem.delivery import DeliveryPump, Leaving
from kvcustody.audit.siem.formats import open_shape
from kvcustody.audit.siem.sink import SinkError, WebhookSink
from kvcustody.audit.siem.sink_folder import SinkFolder, SinkStatus, SinkTrouble, find_troubles
from kvcustody.clock import Clock
from kvcustody.errors import ConfigError, LedgerError
from kvcustody.governance.service.problem_details import ProblemError, not_found
from kvcustody.governance.service.settings import ServiceSettings, Webhook


class Sinks:
    """The pumps of one service by name. Close it before the ledger."""

    def __init__(
        self,
        engine: Engine,
        webhooks: Sequence[Webhook],
        folder: Path,
        clock: Clock,
        record: Callable[[Event], None],
        leaving: Leaving,
        *,
        identity: str,
        delivers: bool = True,
    ) -> None:
        """`leaving`: which leaves may be handed over (`fleet.exports`). `identity`: the ledger's own.

        `delivers`: False where another process has the sinks, which are looked at here.
        """
        self._clock = clock
        self._record = record
        self._elsewhere = {} if delivers else {one.name: SinkFolder(folder / one.name) for one in webhooks}
        self._pumps = {
            webhook.name: _pump(engine, webhook, folder / webhook.name, leaving, identity, clock)
            for webhook in (webhooks if delivers else ())
        }
        for pump in self._pumps.values():
            pump.start()

    def listed(self) -> list[SinkStatus]:
        """Every sink, by name."""
        elsewhere = [_stored(name, folder) for name, folder in sorted(self._elsewhere.items())]
        return elsewhere + [self._pumps[name].status() for name in sorted(self._pumps)]

    def troubles(self) -> list[tuple[str, SinkTrouble]]:
        """Return each sink's problems with its name."""
        return _troubles(self.listed(), self._clock.utc_us())

    def detach(self, name: str, *, by: str, reason: str) -> SinkStatus:
        """Stop feeding a sink, over restarts too; its position stays."""
        pump = self._changed(name, "detached", by, reason)
        pump.detach()
        return pump.status()

    def attach(self, name: str, *, by: str, reason: str) -> SinkStatus:
        """Resume a sink at its position."""
        pump = self._changed(name, "attached", by, reason)
        pump.attach()
        return pump.status()

    def retry(self, name: str, *, by: str, reason: str) -> SinkStatus:
        """Send given-up batches again; `unavailable` where the receiver still refuses them."""
        pump = self._changed(name, "retried", by, reason)
        try:
            pump.retry_dead()
        except SinkError as error:
            raise ProblemError("unavailable", error.message, headers={"Retry-After": "30"}) from None
        return pump.status()

    def acknowledge(self, name: str, *, by: str, reason: str) -> SinkStatus:
        """Stop reporting what the sink has lost so far, because somebody has seen it."""
        pump = self._changed(name, "acknowledged", by, reason)
        pump.acknowledge()
        return pump.status()

    def close(self) -> None:
        """End the threads after the batches in flight."""
        for pump in self._pumps.values():
            pump.close()

    def _changed(self, name: str, action: str, by: str, reason: str) -> DeliveryPump:
        pump = self._pumps.get(name)
        if name in self._elsewhere:
            raise ProblemError("conflict", f"sink `{name}` belongs to the control plane: ask it with --server")
        if pump is None:
            raise not_found()
        self._record(SinkChanged(self._clock.now_us(), name, action, by, reason))
        return pump


def stored_troubles(settings: ServiceSettings, now_us: int) -> list[tuple[str, SinkTrouble]]:
    """Return the problems of a service's sinks from its files."""
    troubles = list[tuple[str, SinkTrouble]]()
    for name in sorted(webhook.name for webhook in settings.webhooks):
        folder = SinkFolder(settings.state_path / "sinks" / name)
        try:
            troubles += _troubles([_stored(name, folder)], now_us)
        except LedgerError as problem:  # of one sink: the others are told all the same
            troubles.append((name, SinkTrouble("unreadable", True, problem.message, "list-sinks")))
    return troubles


def _stored(name: str, folder: SinkFolder) -> SinkStatus:
    return folder.status(name, folder.read_positions())


def _troubles(sinks: Sequence[SinkStatus], now_us: int) -> list[tuple[str, SinkTrouble]]:
    return [(status.name, trouble) for status in sinks for trouble in find_troubles(status, now_us)]


def _pump(
    engine: Engine, webhook: Webhook, folder: Path, leaving: Leaving, identity: str, clock: Clock
) -> DeliveryPump:
    try:
        if webhook.key_path.stat().st_mode & 0o077:
            raise ConfigError(f"webhook `{webhook.name}`: its key is open to others; chmod 600 it")
        key = webhook.key_path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"webhook `{webhook.name}`: key `{webhook.key_path}`: {error.strerror}") from None
    shape = open_shape(webhook.shape, identity)

    def encode(rows: Sequence[EventRow]) -> bytes:
        return orjson.dumps([shape.shape(row) for row in rows])

    sink = WebhookSink(webhook.name, webhook.url, key, content_type=shape.media_type)
    return DeliveryPump(engine, sink, folder, encode, leaving=leaving, clock=clock)
