"""What is refused at start, each by the option's name and with what to set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvcustody.errors import ConfigError
from kvcustody.integrations.tensorrt_llm.open_custody import REFUSED, check_options, model_identity, shared_custody
from standins.integrations.stand_in_engine import BLOCK_TOKENS, llm_args
from standins.integrations.trtllm_world import TrtllmWorld

WRONG: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "disable_overlap_scheduler": False,
    "kv_cache_config.use_kv_cache_manager_v2": "auto",
    "kv_cache_config.enable_partial_reuse": True,
    "kv_cache_config.enable_block_reuse": False,
    "kv_cache_config.secondary_offload_min_priority": 0,
}


def test_what_can_be_governed_is_not_refused() -> None:
    assert check_options(llm_args()) == BLOCK_TOKENS


@pytest.mark.parametrize("option", [one.option for one in REFUSED])
def test_every_other_option_is_refused_by_its_name(option: str) -> None:
    changed = llm_args(**{option.replace(".", "__"): WRONG.get(option, 5)})
    with pytest.raises(ConfigError, match=rf"`{option}` is `.*set it to"):
        check_options(changed)


def test_an_option_that_must_be_named_is_refused_where_it_is_absent() -> None:
    args = llm_args()
    del args.kv_cache_config.enable_partial_reuse
    with pytest.raises(ConfigError, match="enable_partial_reuse"):
        check_options(args)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("connector", "kvbm"),
        ("connector", "lmcache"),
        ("connector_module", "kvbm.trtllm_integration.connector"),
        ("connector_scheduler_class", "DynamoKVBMConnectorLeader"),
        ("connector_worker_class", None),
    ],
)
def test_another_connector_is_refused(field: str, value: str | None) -> None:
    with pytest.raises(ConfigError, match=rf"kv_connector_config.{field}.*out of custody"):
        check_options(llm_args(**{f"kv_connector_config__{field}": value}))


def test_no_connector_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="connector_module"):
        check_options(llm_args(kv_connector_config=None))


def test_the_connector_s_classes_check_before_anything_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "standins.integrations.trtllm_world.llm_args",
        lambda: llm_args(kv_cache_config__host_cache_size=1 << 30),
    )
    with pytest.raises(ConfigError, match="host pool stores KV unencrypted"):
        TrtllmWorld(tmp_path, monkeypatch)


def test_the_door_says_that_no_engine_is_in_its_process() -> None:
    with pytest.raises(ConfigError, match="TLLM_WORKER_USE_SINGLE_PROCESS=1"):
        shared_custody()


def test_a_pool_that_is_not_one_run_of_blocks_is_refused(world: TrtllmWorld) -> None:
    worker = world.custody.worker
    with pytest.raises(ConfigError, match="second pool"):
        worker.register(torch.zeros((4, 8)))
    worker._rows = None
    with pytest.raises(ConfigError, match="one after the other"):
        worker.register(torch.zeros((4, 8)).t())

    class Layout:
        def as_single_pool_tensor(self) -> None:
            return None

    with pytest.raises(ConfigError, match="several pools or layer groups"):
        world.engine.worker.register_kv_cache_layout(Layout())


def test_another_model_revision_or_type_has_another_identity() -> None:
    args = [llm_args(), llm_args(model="other"), llm_args(revision="r2"), llm_args(dtype="bfloat16")]
    assert len({model_identity(one, BLOCK_TOKENS).digest for one in args}) == len(args)
    assert model_identity(llm_args(), 16).digest != model_identity(llm_args(), 8).digest
