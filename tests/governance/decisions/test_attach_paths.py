"""Every place that finds or attaches what another request left, and what reads the custody lease there."""

from __future__ import annotations

import ast
from pathlib import Path

import kvcustody
from kvcustody.clock import MICROSECONDS
from kvcustody.governance.edge.custody_lease import ERASURES
from standins.governance.offload_world import TOKENS, World

PACKAGE = Path(kvcustody.__file__).parent
CALLS = {
    *("match_prefix", "publish_restored", "lookup", "attachable", "look_up", "look_up_tree", "may_restore"),
    *("fork", "attached", "reads_own"),
}
LEASED = {
    # a Governor: the decision before the look-up, again after a wait, and at a fork
    "governance/decisions/reuse_decision.py": {"read_plan": "`_is_over`"},
    "governance/decisions/authority.py": {"reads_own": "`_is_over`"},
    "governance/governor/governor.py": {
        "_match": "`_holds_still`, and `is_over` where it is monitored",
        "_holds_still": "`nothing_from_us`",
        "fork": "`may_fork`",
    },
    "governance/governor/forecast_pools.py": {
        "judge": "attaches nothing: a forecast",
        "_start": "attaches nothing: a forecast",
        "_fork": "attaches nothing: a forecast",
    },
    "governance/monitoring/port_forecast.py": {"_find": "attaches nothing: a forecast"},
    # an engine port: the decision before the look-up, again at the attach
    "governance/external/engine_port.py": {
        "look_up_tree": "`attachable`",
        "attachable": "`is_over`",
    },
    "governance/external/monitored_port.py": {"_attachable_monitored": "of `attachable`"},
    "governance/external/block_keys.py": {
        "_matched": "`attachable` is asked after",
        "_through": "`attachable` is asked after",
    },
    "governance/external/namespace_keys.py": {"_attachable": "`attachable` is asked after"},
    # tiers: `TierRules.withholds` at each look-up, `may_restore` before a load is ordered elsewhere
    "governance/governor/offloading.py": {"_restore_span": "`withholds`, at the look-up"},
    "governance/tiers/run_transfers.py": {"best": "`withholds`", "look_up": "`withholds`"},
    "governance/tiers/tier.py": {"give": "`withholds`, at the look-up; who fetches decides anew"},
    "integrations/vllm/tiers/scheduler_handover.py": {"_begin": "`may_restore`"},
    "governance/tiers/owned_copies.py": {"load": "`withholds`", "seek": "brings nothing back"},
    "integrations/lmcache/custody_thread.py": {
        "has": "`withholds`",
        "store": "brings nothing back",
        "_place": "`withholds`",
        "forget": "brings nothing back",
    },
    "integrations/tensorrt_llm/transfer_thread.py": {"_claim": "`withholds`"},
    "integrations/tensorrt_llm/derived_salt.py": {"derive": "`reads_own`, where the engine gets its salt"},
    "integrations/vllm/tiers/scheduler_tiers.py": {"_spans": "`may_restore`"},
    "integrations/vllm/tiers/worker_tiers.py": {
        "_load_part": "ordered by a scheduler that asked `may_restore`",
        "_seek": "brings nothing back",
        "ends": "of `_seek`: brings nothing back",
    },
    "integrations/sglang/slot_tiers.py": {"_chain": "`may_restore`"},
    # engines' adapters
    "integrations/sglang/radix_cache.py": {
        "match_prefix": "`look_up_tree`",
        "init_load_back": "`may_restore`",
    },
    "integrations/sglang/slot_custody.py": {
        "look_up": "`look_up_tree`",
        "begin": "told after `look_up_tree`, in one step",
        "publish": "`attachable`",
    },
    "integrations/vllm/scheduler/scheduler_state.py": {
        "begin_look_up": "the decision",
        "attachable_tokens": "`attachable`",
    },
    "integrations/vllm/scheduler/deferred_calls.py": {"_report_allocations": "told after `attachable_tokens`"},
    "integrations/transformers/batching/paged_cache.py": {"prepare_fork_request": "`may_fork`"},
}


def test_every_attach_path_is_known() -> None:
    callers: dict[str, set[str]] = {}
    for folder in ("governance", "integrations"):
        for path in (PACKAGE / folder).rglob("*.py"):
            for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(function, ast.FunctionDef) and _calls(function) & CALLS:
                    callers.setdefault(str(path.relative_to(PACKAGE)), set()).add(function.name)
    assert callers == {path: set(names) for path, names in LEASED.items()}


def _calls(function: ast.FunctionDef) -> set[str]:
    calls = (each.func for each in ast.walk(function) if isinstance(each, ast.Call))
    return {each.attr for each in calls if isinstance(each, ast.Attribute)}


def test_a_tier_brings_nothing_back_past_the_lease(tmp_path: Path) -> None:
    world = World(tmp_path, "host")
    governor, prompts = (
        world.worker.governor,
        [list(range(at, at + 4 * TOKENS + 1)) for at in range(1, 9000, 1000)],
    )
    for prompt in prompts:
        world.serve("acme", prompt)
        governor.step()
    assert world.serve("acme", prompts[0]) == 4 * TOKENS, "the control: it left the pool, and came back"
    governor.renew_custody(ERASURES, governor.clock.now_us() + MICROSECONDS)
    world.clock.advance(MICROSECONDS)
    assert [world.serve("acme", prompt) for prompt in prompts] == [0] * len(prompts)
    governor.renew_custody(ERASURES, 1 << 61)
    assert world.serve("acme", prompts[-1]) == 4 * TOKENS
    world.worker.close()
