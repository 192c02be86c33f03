"""Books over a bare cache manager: everything is told to a real engine port, nothing is denied."""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

from kvcustody.allocator.external.pool import ExternalPool
from kvcustody.allocator.external.residency import ExternalResidency
from kvcustody.audit.write.event_queue import TenantShares
from kvcustody.clock import SystemClock
from kvcustody.governance.external.engine_control import EngineView
from kvcustody.governance.external.engine_port import EnginePort
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.root_key_wrapping import open_wrapping
from kvcustody.governance.keys.wrapped_key_store import FileKeyStore
from kvcustody.governance.request import NO_HINTS
from kvcustody.integrations.vllm.scheduler.block_pool import governed_pool
from kvcustody.integrations.vllm.scheduler.cache_manager import governed_manager
from kvcustody.integrations.vllm.scheduler.engine_control import VllmControl
from kvcustody.integrations.vllm.scheduler.extra_content import extras_of
from kvcustody.integrations.vllm.scheduler.governed_request import (
    ATTRIBUTE,
    GovernedRequest,
    governed_request,
)
from kvcustody.integrations.vllm.scheduler.scheduler_state import SchedulerState
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from kvcustody.tenants import Issuers
from kvcustody.testkit.tiny_model import tiny_model
from standins.engines.vllm.deployment import POLICY, principal

_numbers = itertools.count()
MODEL = tiny_model(
    weights_digest="sha256:w",
    tokenizer_digest="sha256:t",
    chat_template="t",
    kv_dtype="bf16",
    kv_layout="default",
)


class NoLedger:
    """A ledger that is always there and keeps nothing."""

    admitting = recording = True
    shares = TenantShares()

    def issuers(self) -> Issuers:
        return Issuers()

    def submit(self, events: Sequence[object], /) -> int:
        return 0

    def submit_durable(self, event: object, /) -> int:
        return 0


class ListeningBooks(SchedulerState):
    """The adapter's state, with requests that nobody admitted admitted when they first show, and vLLM's hashes kept."""

    def begin_look_up(self, request: Any) -> bool:
        governed = self._mine(request)
        governed.hit_blocks = (0,) * len(self.groups)
        self.deferred.flush_unchecked()
        governed.publishes = self.caching
        if not self.caching or request.skip_reading_prefix_cache:
            return False
        governed.residency.expected = governed.residency.domain.tag
        governed.readable_tokens = 1 << 40
        self.reading = governed
        return True

    def _mine(self, request: Any) -> GovernedRequest:
        governed = governed_request(request)
        if governed is None or governed.residency is None:
            extras = extras_of(request, self.block_tokens)
            governed = GovernedRequest(request, principal("alpha"), NO_HINTS, MODEL, extras, len(self.groups))
            # Token ids do not matter where vLLM's hashes stay; request ids come back in its tests, ours do not.
            number = f"{request.request_id}#{next(_numbers)}"
            answer = self.port.admit(governed.principal, MODEL, [0], request_id=number)
            assert isinstance(answer, ExternalResidency)
            governed.residency = answer
            governed.publishes = self.caching
            setattr(request, ATTRIBUTE, governed)
            self.requests[request.request_id] = governed
        return governed

    def view(self, kept: Container[str] = ()) -> EngineView:
        live = (governed.residency for governed in self.requests.values() if not governed.request.is_finished())
        found = super().view(kept)
        return found._replace(requests=frozenset(one.request_id for one in live if one is not None))

    def agree(self) -> None:
        """The port's books and vLLM's say the same."""
        self.deferred.flush()
        self.port.step()
        found = self.port.check() + [str(finding) for finding in self.port.scan()]
        assert not found, found


def listen(manager: Any, folder: Path) -> ListeningBooks:
    """Put `manager` and its pool under custody."""
    table, keyring = _foundation(folder)
    block_tokens = manager.block_pool.hash_block_size
    control = VllmControl()
    control.state = state = ListeningBooks(manager, block_tokens)
    pool = ExternalPool(len(manager.block_pool.blocks), reserved=[manager.block_pool.null_block.block_id])
    state.port = EnginePort(pool, control, table, keyring, NoLedger(), clock=SystemClock(), block_tokens=block_tokens)
    governed_pool(manager.block_pool, state)
    governed_manager(manager, state)
    allocates = manager.allocate_slots

    @functools.wraps(allocates)
    def allocate_slots(request: Any, *arguments: Any, **named: Any) -> Any:
        governed = state._mine(request)
        hits = named.get("new_computed_blocks") or (arguments[2] if len(arguments) > 2 else None)
        if hits is not None:  # some tests make a hit up
            governed.hit_blocks = tuple(map(len, hits.blocks))
        blocks = allocates(request, *arguments, **named)
        if blocks is not None and request.request_id not in state.deferred.running:
            state.after_allocation(request)
        state.deferred.flush()  # as after each step
        return blocks

    manager.allocate_slots = allocate_slots
    return state


@functools.cache
def _foundation(folder: Path) -> Any:
    home = Path(tempfile.mkdtemp(dir=folder))
    port = open_wrapping("generated", home / "root.key", strict=False)
    keyring = Keyring(FileKeyStore(home / "keys.json"), port, SystemClock())
    return compile_policy(load_policy(POLICY, name="listening"), revision=1), keyring
