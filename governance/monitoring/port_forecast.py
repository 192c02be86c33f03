"""A forecast for an engine with its own allocator: its monitored requests in a pool of the same size.

    forecast.judge(request, read, reasons, now_us)           # what it would find: `request.forecast_blocks`
    forecast.begin(request); forecast.given(request, blocks)  # the engine gave it blocks
    forecast.computed(request, blocks, now_us); forecast.extend(request, tokens, now_us)
    forecast.end(request, cause, now_us)
    forecast.when_known(request, record)                     # `record` is called once, when it is known

- A request's whole length is reserved, as `PortAccounts.fits` says, before it may begin.
- What would be put off for its tenant's quota waits here, oldest first, while the real request runs. It begins, and
  catches up, as soon as there is room: at the next look-up, the next step, or when nothing runs any more.
- A request that would not be admitted takes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from kvcustody.allocator.pool.accounting import Domain
from kvcustody.allocator.prefix.longest_prefix import ReadPlan
from kvcustody.governance.external.block_keys import look_up
from kvcustody.governance.monitoring.forecast_cache import ForecastCache
from kvcustody.governance.monitoring.monitor import ForecastRun, MonitoredRequest, WaitingForecast


class WaitingRun(ForecastRun):
    """A request that would wait for its tenant's quota, and what the real one does meanwhile."""

    __slots__ = ("computed", "is_over", "record", "tokens")

    def __init__(self) -> None:
        self.computed: int | None = 0  # leading blocks; None: all that have keys
        self.tokens: list[int] = []  # accepted
        self.is_over = False
        self.record: Callable[[], None] | None = None


class PortForecast(WaitingForecast[MonitoredRequest]):
    """The cache and its running requests, as enforcement would have made them. Belongs to the port's owning thread.

    `common_blocks`: what no guarantee has claimed of the pool.
    """

    def __init__(self, cache: ForecastCache, common_blocks: Callable[[], int]) -> None:
        super().__init__()
        self.cache = cache
        self._common_blocks = common_blocks
        self._reserved: dict[str, int] = {}  # blocks, by the tenant that runs

    # -- requests -----------------------------------------------------------------------------------------------------

    def judge(self, request: MonitoredRequest, read: ReadPlan | None, reasons: tuple[str, ...], now_us: int) -> None:
        """Find what the request could read from the forecast cache under the policy."""
        self.start_waiting(now_us)
        request.read, request.reasons, request.forecast_blocks = read, reasons, 0
        request.keys, request.segment_blocks, request.granted_blocks = [], 0, 0
        if request.refusal:
            return
        if request.private is None and not self._start(request, now_us):
            request.run = WaitingRun()
            return
        request.run = None
        self._find(request, now_us)

    def begin(self, request: MonitoredRequest) -> None:
        """Begin a request that has its blocks: those that it would have matched are in use."""
        if request.refusal:
            return
        if isinstance(request.run, WaitingRun):
            self._wait(request)
            return
        self._attach(request)

    def given(self, request: MonitoredRequest, blocks: int) -> None:
        """Count the blocks that the engine gave it."""
        request.blocks += blocks
        if request.private is not None:
            self._charge(request)

    def computed(self, request: MonitoredRequest, blocks: int | None, now_us: int) -> None:
        """Publish the leading blocks that are computed (None: all that have keys)."""
        run = request.run
        if isinstance(run, WaitingRun):
            run.computed = None if blocks is None or run.computed is None else max(run.computed, blocks)
        elif request.private is not None:
            until = len(request.keys) if blocks is None else min(blocks, len(request.keys))
            if until > request.published:
                self._publish(request, until, now_us)
                self._charge(request)

    def extend(self, request: MonitoredRequest, tokens: Iterable[int], now_us: int) -> None:
        """Note blocks that new tokens completed."""
        run = request.run
        if isinstance(run, WaitingRun):
            run.tokens += tokens
        elif request.governed is not None and request.keys and request.private is not None:
            request.keys += request.governed.extend(list(tokens))
            self._publish(request, len(request.keys), now_us)
            self._charge(request)

    def end(self, request: MonitoredRequest, cause: str, now_us: int) -> None:
        """End a request; a second call changes nothing."""
        run = request.run
        if isinstance(run, WaitingRun) and cause == "finished" and request in self._waiting:
            run.is_over = True  # it waits still, and will run at once
        elif isinstance(run, WaitingRun):
            self._drop(request)
        else:
            self._leave(request, now_us)

    def when_known(self, request: MonitoredRequest, record: Callable[[], None]) -> None:
        """Call `record` when it is known what the request would have matched."""
        if isinstance(request.run, WaitingRun):
            request.run.record = record
        else:
            record()

    def forget(self, covers: Callable[[Domain], bool], now_us: int) -> None:
        """Forget the blocks that an erasure ends, or those of tenants that are enforced now."""
        self.cache.forget(covers)
        for request in list(self._waiting):
            if request.read is not None and covers(request.read.own.domain):
                self._drop(request)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _is_idle(self) -> bool:
        return not any(self._reserved.values())

    def _start(self, request: MonitoredRequest, now_us: int) -> bool:
        """Its whole length, until its end; its tenant's own cache makes room."""
        if not request.is_reserved:
            tenant, need = request.reader, request.reserved_blocks
            if not self._fits(tenant, need):
                return False
            self._reserved[tenant] = self._reserved.get(tenant, 0) + need
            request.is_reserved = True
            self.cache.make_room(tenant, need)
        return True

    def _fits(self, tenant: str, need: int) -> bool:
        quota_of, size, common = self.cache.quota_of, self.cache.pool_blocks, self._common_blocks()
        quota, mine = quota_of(tenant), self._reserved.get(tenant, 0)
        if common == size and quota.cap >= size:
            return True  # the engine's own admission stands
        if mine + need > quota.cap:
            return False
        over = sum(
            max(0, blocks - quota_of(other).guaranteed) for other, blocks in self._reserved.items() if other != tenant
        )
        return over + max(0, mine + need - quota.guaranteed) <= common

    def _find(self, request: MonitoredRequest, now_us: int) -> None:
        chain, read = request.governed, request.read
        if chain is None or read is None:
            return
        chain.forget()
        found = look_up(request, chain, read, self.cache, self.cache.find, now_us, lazily=False)
        request.keys = list(found.keys)
        chains = (read.own, *read.grants, *(() if read.segment is None else (read.segment,)))
        request.domains = {chain.domain.tag: chain.domain for chain in chains}
        numbers: list[int] = []
        for key in request.keys[: found.readable]:
            number = self.cache.find(key)
            if number < 0:
                break
            numbers.append(number)
        if numbers:
            expected = request.expected
            expected = expected if isinstance(expected, int) else expected[: len(numbers)]
            request.forecast_blocks = self.cache.attachable(np.array(numbers, dtype=np.int64), expected, now_us)

    def _attach(self, request: MonitoredRequest) -> None:
        request.entries = self.cache.attach([self.cache.find(key) for key in request.keys[: request.forecast_blocks]])
        request.published = len(request.entries)
        request.private = 0
        self._charge(request)

    def _catch_up(self, request: MonitoredRequest, now_us: int) -> None:
        """It begins now; what the real request did while this one waited."""
        run, request.run = request.run, None
        assert isinstance(run, WaitingRun)
        self._find(request, now_us)
        self._attach(request)
        self.computed(request, run.computed, now_us)
        if run.tokens:
            self.extend(request, run.tokens, now_us)
        if run.record is not None:
            run.record()
        if run.is_over:
            self._leave(request, now_us)

    def _leave(self, request: MonitoredRequest, now_us: int) -> None:
        if request.is_reserved:
            request.is_reserved = False
            self._reserved[request.reader] -= request.reserved_blocks
        if request.private is None:
            return
        self.computed(request, None, now_us)
        self.cache.charge(request.reader, -request.private)
        request.private = None
        entries, request.entries = request.entries, []
        self.cache.release(entries, request.reader, now_us)

    def _drop(self, request: MonitoredRequest) -> None:
        run, request.run = request.run, None
        if request in self._waiting:
            self._waiting.remove(request)
        if isinstance(run, WaitingRun) and run.record is not None:
            run.record()

    def _charge(self, request: MonitoredRequest) -> None:
        """It is charged for what has no entry of its own."""
        left = max(0, request.blocks - len(request.entries))
        more, request.private = left - (request.private or 0), left
        self.cache.charge(request.reader, more)

    def _publish(self, request: MonitoredRequest, until: int, now_us: int) -> None:
        first, granted, own = request.published, request.granted_blocks, request.read
        if first >= until or own is None or granted > request.forecast_blocks:
            return
        tags = [] if isinstance(request.expected, int) else request.expected.tolist()
        domains = [
            request.domains.get(tags[at], own.own.domain) if at < len(tags) else own.own.domain
            for at in range(first, until)
        ]
        before = request.entries[-1] if request.entries else None
        made = self.cache.publish(request.keys[first:until], domains, before, now_us)
        request.entries += made
        request.published = until
