"""From SGLang's context to a governed cache with an open port: options checked, pool zeroed, ledger and tiers open."""

from __future__ import annotations

from typing import Any

from kvcustody.errors import ConfigError
from kvcustody.governance.observability.logs import configure
from kvcustody.governance.settings import Settings, load_settings
from kvcustody.governance.tiers.heirs import TierHolder
from kvcustody.governance.tiers.open_tiers import BlockShape, TierPlan, open_tiers, tier_names, tier_plan
from kvcustody.governance.tiers.run_transfers import RunTransfers
from kvcustody.governance.tiers.tier_rules import TierRules
from kvcustody.governance.worker.engine_worker import EnginePlan, open_engine_worker
from kvcustody.governance.worker.plugins import open_root_key
from kvcustody.integrations.identity.from_settings import check_issuers, open_verifier
from kvcustody.integrations.sglang.check_engine import check_kind, check_options, check_version
from kvcustody.integrations.sglang.model_identity import LoadedModel
from kvcustody.integrations.sglang.page_allocator import govern_allocator
from kvcustody.integrations.sglang.page_memory import PADDING_PAGE, PageMemory
from kvcustody.integrations.sglang.page_tree import PageTree
from kvcustody.integrations.sglang.radix_cache import GovernedRadixCache
from kvcustody.integrations.sglang.slot_events import WatchedTree
from kvcustody.integrations.sglang.slot_tiers import SlotTiers, unit_pages
from kvcustody.logger import get_logger

_log = get_logger(__name__)


def build_cache(context: Any) -> GovernedRadixCache:
    """Return a scheduler's cache for SGLang's registry.

    Raises:
        CustodyError: says what cannot be governed.
    """
    check_version()
    check_options(context.server_args)
    check_kind(is_hybrid_swa=context.is_hybrid_swa, is_hybrid_ssm=context.is_hybrid_ssm, is_dsa=context.is_dsa)
    params = context.params
    if params.is_eagle:
        raise ConfigError("speculative drafts share the tree's keys; that is not governed")
    settings = load_settings()
    tiers = tier_plan(settings)
    configure(settings.log_level, settings.log_format)
    allocator = params.token_to_kv_pool_allocator
    govern_allocator(allocator)
    size = params.page_size
    if allocator.page_size != size:
        raise ConfigError(f"the allocator's pages have `{allocator.page_size}` slots, the tree's `{size}`")
    pool, pages = allocator.get_kvcache(), allocator.size // size + 1
    memory = PageMemory(pool, pages, size)
    model = LoadedModel(context.server_args, context.model_config, size, pool)
    listened = settings.publishes_kv_events
    tree = (WatchedTree if listened else PageTree)(memory.pages, size)
    cache = GovernedRadixCache(params, model, memory, tree)
    plan = EnginePlan(
        blocks=memory.pages,
        block_tokens=size,
        bytes_per_block=memory.bytes_per_page,
        device=str(context.server_args.device),
        reserved=(PADDING_PAGE, *range(pages, memory.pages)),
        tiers=tuple(tier_names(settings)),
    )
    worker = open_engine_worker(settings, plan, cache.custody)
    try:
        check_issuers(settings, worker.port.table.policy.issuers)
        cache.tokens = open_verifier(settings, worker.clock)
        cache.worker = worker
        cache.custody.port = worker.port
        if tiers is not None:
            _open_tiers(cache, settings, tiers)
        if listened:
            _open_publisher(cache, settings)
        cache.custody.step()  # the whole pool, read back, before the first request
    except BaseException:
        with cache.tier_stack:
            worker.close()
        if cache.custody.events is not None:
            cache.custody.events.close()
        raise
    _log.info("sglang in custody", pages=pages, page_tokens=size, bytes_per_page=memory.bytes_per_page)
    return cache


def _open_publisher(cache: GovernedRadixCache, settings: Settings) -> None:
    """Open the publisher of block events for the settings.

    Raises:
        ConfigError: the address cannot be bound.
    """
    from kvcustody.integrations.events.publisher import open_publisher  # pyzmq only where it is asked for

    worker = cache.worker
    assert worker is not None
    publisher = open_publisher(settings, revision=worker.port.table.revision, incarnation=worker.writer.incarnation)
    assert publisher is not None, "somebody is told"
    cache.custody.publish_to(publisher, publisher.close, with_tokens=settings.kv_events_tokens == "published")


def _open_tiers(cache: GovernedRadixCache, settings: Settings, plan: TierPlan) -> None:
    """Open the settings' tiers for copies.

    Raises:
        ConfigError: names the setting that is impossible.
    """
    worker, memory, size = cache.worker, cache.memory, cache.page_size
    assert worker is not None
    port, pages = worker.port, unit_pages(size)
    shape = BlockShape(pages * memory.bytes_per_page, 1, pages * size)
    rules = TierRules(
        lambda: port.tables,
        port.authorize,
        lambda: port.restricted,
        lambda: port.custody.is_over(port.clock.now_us()),
    )
    root = open_root_key(settings)
    holder = TierHolder(settings.worker_name, settings.placement_group, worker.writer.incarnation)
    tiers = open_tiers(plan, shape, port.keyring, root, worker.clock, cache.tier_stack, rules, holder)
    for tier in tiers:
        tier.staging.pin(memory.pin)
    transfers = RunTransfers(tiers, port.measures.cost, worker.clock, shape.block_tokens, always=plan.moves_always)
    cache.custody.tiers = SlotTiers(transfers, port, memory, size)
    port.erasures.destroy_returned(worker.completed)
