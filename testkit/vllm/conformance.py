"""vLLM under the conformance kit: its own engine core, scheduler and cache manager, with the toy device as the model.

`kvcustody conformance --engine kvcustody.testkit.vllm.conformance:engine`

1. Block tables, free list, index and states are read from vLLM's objects, bytes from the workers' tensors.
2. The kit's clock decides every deadline: the adapter's timer fires when `idle` comes to its instant, on this thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, cast

from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import get_block_hash
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request, RequestStatus

from kvcustody.allocator.external.pool import ExternalPool
from kvcustody.allocator.pool.block_state import NEVER_US
from kvcustody.audit.kinds import Event
from kvcustody.audit.write.event_writer import EventWriter
from kvcustody.governance.credentials.scope_token import ScopeTokens
from kvcustody.governance.edge.erase_epochs import KnownEpochs
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.external.engine_control import EngineControl
from kvcustody.governance.external.engine_port import EnginePort
from kvcustody.governance.identity.principal import Principal
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.locked_buffer import KEY_BYTES, KeyBuffer
from kvcustody.governance.worker.engine_worker import EnginePlan, EngineWorker
from kvcustody.integrations.events.block_event import BlockEvent
from kvcustody.integrations.vllm.open_custody import OpenedCustody
from kvcustody.integrations.vllm.scheduler.scheduler_side import TRANSFER
from kvcustody.testkit.conformance.deployment import KeepingLedger, KeepingPublisher, keyring, table
from kvcustody.testkit.conformance.engine_protocol import (
    ABORTED,
    FINISHED,
    REFUSED,
    RUNNING,
    WAITING,
    Capabilities,
    FirstWrite,
    RequestOutcome,
    RequestSpec,
    Setup,
)
from kvcustody.testkit.conformance.engines.toy_model import canary_of
from kvcustody.testkit.vllm.modelless_engine import (
    BLOCK_TOKENS,
    BareEngine,
    ConnectorBeside,
    EngineShape,
    KitTimer,
    preempt,
)

_LACKS = {
    "forks": "vLLM has none: `n` samples are requests of their own, each under a use of its request's token",
    "tier": "a connector that keeps blocks elsewhere is refused",
}
_FINISHED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


class VllmEngineUnderTest:
    """`EngineUnderTest` over `BareEngine`. Requests are named by the order of submission."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._clock = setup.clock
        self._ledger = KeepingLedger()
        self._told = KeepingPublisher()
        self._tokens = ScopeTokens(KeyBuffer.random(KEY_BYTES), setup.clock)
        self._revision = 1
        self._requests: dict[str, Request] = {}
        self._outputs: dict[str, list[int]] = {}
        self._errors: dict[str, str] = {}
        self._closed = False
        shape = EngineShape(setup.blocks, setup.shards, asynchronous=setup.steps_in_flight > 0)
        self._core = BareEngine(shape, self._open, setup.clock, self.beside())
        self._side = self._core.kvcustody.side
        self._manager = self._core.scheduler.kv_cache_manager
        self._timer = KitTimer(self._core.kvcustody.tick)
        self._side.timer.close()
        self._side.timer = cast(Any, self._timer)
        self._side.publish_to(self._told)
        self._core.serve(self._take)  # the boot order
        self.capabilities = Capabilities("vllm", BLOCK_TOKENS, setup.blocks, shards=setup.shards, lacks=_LACKS)

    def beside(self) -> ConnectorBeside | None:
        """Return a connector to run beside ours."""
        return None

    def keyring(self) -> Keyring:
        """Return the engine's keys."""
        return keyring(self._clock)

    def _open(self, settings: object, plan: EnginePlan, control: EngineControl) -> OpenedCustody:
        pool = ExternalPool(
            plan.blocks, shards=plan.shards, bytes_per_block=plan.bytes_per_block, reserved=plan.reserved
        )
        port = EnginePort(
            pool,
            control,
            table(self._setup.policy),
            self.keyring(),
            self._ledger,
            clock=self._clock,
            block_tokens=plan.block_tokens,
        )
        worker = EngineWorker(port, cast(EventWriter, self._ledger), "kit", port.clock, ExitStack())
        return OpenedCustody(port, self._tokens, self._clock, worker)

    # -- requests -----------------------------------------------------------------------------------------------------

    def mint(self, principal: Principal, valid_us: int) -> str:
        """Return a valid raw token for one request."""
        return self._tokens.issue(principal, ttl_seconds=-(-valid_us // 1_000_000))

    def submit(self, ask: RequestSpec) -> object:
        """Submit a request as the API server does: the token is the salt, or stands beside a reference to it."""
        name = f"request-{len(self._requests)}"
        salt, transfer, identity = ask.salt, None, ask.identity
        if isinstance(identity, Principal):
            token = self._tokens.issue(identity, route=ask.route, client_salt=ask.salt, epochs=ask.epochs)
            salt, transfer = self._tokens.carry(token)
        elif identity is not None:
            salt = identity
        tenant = identity.tenant if isinstance(identity, Principal) else "anonymous"
        self._core.workers.canaries[name] = canary_of(tenant)
        sampling = SamplingParams(max_tokens=ask.max_tokens, ignore_eos=True)
        if transfer is not None:
            sampling.extra_args = {"kv_transfer_params": {TRANSFER: transfer}}
        arrived = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=list(ask.tokens),
            mm_features=None,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=salt,
            data_parallel_rank=None,
        )
        request, wave = self._core.preprocess_add_request(arrived)
        self._requests[name], self._outputs[name] = request, []
        self._core.add_request(request, wave)
        return name

    def step(self) -> bool:
        """Run one turn of the engine's loop."""
        self._core.turn(self._take)
        return self._core.has_live_requests

    def _take(self, output: Any) -> None:
        name = output.request_id
        self._outputs[name] += output.new_token_ids
        if output.finish_reason is not None and output.stop_reason is not None:
            self._errors[name] = str(output.stop_reason)

    def outcome(self, request: object) -> RequestOutcome:
        """Return the facts from vLLM's own request and block table, and from the engine's outputs."""
        name = str(request)
        one = self._requests[name]
        state = _state(one)
        cached = self._core.model_executor.cached.get(name)
        if state == ABORTED and one.status is RequestStatus.FINISHED_ERROR and cached is None:
            state = REFUSED
        blocks = self._manager.get_block_ids(name)[0] if state == RUNNING else []
        error = self._errors.get(name, "")
        return RequestOutcome(state, cached or 0, tuple(self._outputs[name]), error, tuple(blocks), error)

    def abort(self, request: object) -> None:
        """Abort a request as an abort message between two steps does."""
        self._core.abort_requests([str(request)])

    def disconnect(self, request: object) -> None:
        """Abort a request as one that arrives during a step: vLLM carries it out after the step."""
        if _state(self._requests[str(request)]) in (WAITING, RUNNING):
            self._core.aborts_queue.put_nowait([str(request)])

    def preempt(self, request: object) -> None:
        """Preempt a request as vLLM does when it resets its cache under running requests."""
        one = self._requests[str(request)]
        if one.status is RequestStatus.RUNNING:
            preempt(self._core.scheduler, one)

    def fork(self, request: object) -> object:
        """Do nothing: see `_LACKS`."""
        raise NotImplementedError

    # -- time and administration --------------------------------------------------------------------------------------

    def idle(self, microseconds: int) -> None:
        """Run the engine's loop until it waits, then only what its timer starts."""
        end_us = self._clock.now_us() + microseconds
        self._core.serve(self._take)
        while (now_us := self._clock.now_us()) < end_us:
            due_us = self._timer.due_us
            self._clock.advance(max(0, (end_us if due_us is None else min(due_us, end_us)) - now_us))
            while self._timer.fire(self._clock.now_us()):
                if not self._core.input_queue.empty():
                    self._core.serve(self._take)

    def activate(self, policy: str) -> None:
        """Activate a policy revision through vLLM's utility call."""
        self._revision += 1
        cast(Any, self._core).kvcustody_activate(policy, self._revision, "conformance")

    def erase(self, selector: Selector) -> None:
        """Erase through vLLM's utility call."""
        cast(Any, self._core).kvcustody_erase(selector.tenant, selector.subject, selector.session)

    def take_epochs(self, known: KnownEpochs) -> None:
        """Take erase epochs as a worker that learns of them."""
        self._side.port.take_epochs(known, NEVER_US)

    def scan(self) -> list[str]:
        """Scan through vLLM's utility call."""
        return list(cast(Any, self._core).kvcustody_scan())

    def check(self) -> list[str]:
        """Return the port's violated invariants, and differences between vLLM's references, block tables and free
        list.
        """
        problems = list(cast(Any, self._core).kvcustody_check())
        problems += self._core.disagreements(self._side.state.withheld)
        handed_out, told = (
            self._side.state.deferred.allocated_blocks,
            self._side.port.pool.next_generation - 1,
        )
        if handed_out != told:
            problems.append(f"vllm handed out {handed_out} blocks, the port was told of {told}")
        return problems

    def close(self) -> None:
        """End what runs, let the loop become idle, and shut down."""
        if self._closed:
            return
        self._closed = True
        self._core.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        self._core.serve(self._take)
        self._core.close()

    # -- evidence -----------------------------------------------------------------------------------------------------

    def watch(self, probe: Callable[[FirstWrite], None]) -> None:
        """Use the device's own probe."""
        self._core.workers.device.probe = probe

    def read(self, blocks: Sequence[int]) -> list[bytes]:
        """Return all bytes of each block, every shard."""
        return [self._core.workers.device.get(block) for block in blocks]

    def free_blocks(self) -> tuple[int, ...]:
        """Return the blocks in vLLM's free queue that are not in its index."""
        blocks = self._manager.block_pool.blocks
        return tuple(number for number in self._core.free_queue() if blocks[number].block_hash is None)

    def indexed(self) -> frozenset[bytes]:
        """Return the keys of vLLM's index."""
        cached = (block.block_hash for block in self._manager.block_pool.blocks)
        return frozenset(bytes(get_block_hash(key)) for key in cached if key is not None)

    def events(self) -> list[BlockEvent]:
        """Return the published events; the last step's index changes are fetched as the next step's end would."""
        watched = self._side.state.events
        assert watched is not None
        watched.publish_pending()
        taken, self._told.events = self._told.events, []
        return taken

    def ledger(self) -> list[Event]:
        """Return every event handed to the ledger."""
        return list(self._ledger.events)

    # -- faults -------------------------------------------------------------------------------------------------------

    def stick(self, block: int) -> None:
        """Make the last worker's memory refuse to become zero."""
        side = self._core.workers.governed[-1].worker_side
        assert side is not None and side.memory is not None
        side.memory.stuck.add((0, block))

    def hold_transfers(self, held: bool) -> None:
        """Do nothing: there is no tier."""

    def tier(self) -> list[Any]:
        """Return nothing: there is no tier."""
        return []

    def drop_index(self) -> None:
        """Do nothing: there is no tier."""


def _state(request: Request) -> str:
    if request.status is RequestStatus.RUNNING:
        return RUNNING
    if not request.is_finished():
        return WAITING
    return FINISHED if request.status in _FINISHED else ABORTED


def engine(setup: Setup) -> VllmEngineUnderTest:
    """Return the kit's factory."""
    return VllmEngineUnderTest(setup)
