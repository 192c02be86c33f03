"""What the same engine does with vLLM's own connectors: the figures beside which those of governed tiers stand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vllm.config import KVTransferConfig

from standins.engines.vllm.local_engine import BLOCK, LocalEngine
from standins.engines.vllm.tier_engines import BLOCKS, PREFIX, displace, prompt, tier


def test_a_host_tier_of_vllms_own_holds_blocks_in_clear_and_keeps_them(start: Callable[..., LocalEngine]):
    transfer = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "spec_name": "ClearOffloadingSpec",
            "spec_module_path": "standins.engines.vllm.clear_offload",
            "cpu_bytes_to_use": 64 << 20,
            "block_size": 4 * BLOCK,
        },
    )
    engine = start(kv_transfer_config=transfer, num_gpu_blocks_override=BLOCKS)
    mine = prompt(1)
    engine.ask(mine, tenant="alpha")
    indexed = engine.probe("pool")["indexed"]
    contents = [engine.rpc("block_content", block)[0] for block, is_there in enumerate(indexed) if is_there]
    contents = [content for content in contents if len(set(content)) > 8]
    displace(engine)
    assert engine.ask(mine, tenant="alpha").cached_tokens == PREFIX * BLOCK
    found = [engine.rpc("clear_tier_has", content)[0] for content in contents]
    print("blocks of the prompt in clear:", sum(map(bool, found)), "of", len(contents))
    assert sum(map(bool, found)) >= PREFIX - 1


def test_a_shared_storage_connector_gives_another_salt_what_a_salt_kept(
    start: Callable[..., LocalEngine], tiered: LocalEngine, tmp_path: Path
):
    transfer = KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": str(tmp_path)},
    )
    engine = start(
        kv_transfer_config=transfer,
        num_gpu_blocks_override=BLOCKS,
        max_num_batched_tokens=512,  # it saves what one step computes
    )
    mine = [*prompt(60), 21, 22, 23]
    asked = {}
    for name, one in (("plain", engine), ("governed", tiered)):
        one.ask(mine, tenant="victim")
        displace(one)
        asked[name] = one.ask(mine, tenant="attacker").cached_tokens
    print("an attacker's hits:", asked, tier(tiered))
    assert asked["plain"] >= (PREFIX - 1) * BLOCK
    assert asked["governed"] == 0
