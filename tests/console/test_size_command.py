"""`kvcustody size` for tenants: their quotas in blocks and tokens, how many of one profile fit, and the plot."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvcustody.console.size.command import app

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
BLOCK = 16 * 131_072


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return str(path)


def sized(config: str, *options: str) -> dict:
    arguments = [config, "--gpu-memory", "80GiB", "--weights", "16GiB", "--json", *options]
    run = CliRunner().invoke(app, arguments)
    assert run.exit_code == 0, run.output
    return json.loads(run.output)


def test_tenants_get_blocks_and_tokens_from_their_quotas(config: str) -> None:
    found = sized(config, "--policy", "regulated-saas")
    rows = {row["tenant"]: row for row in found["tenants"]}
    blocks = found["blocks"]
    acme = rows["acme"]
    assert acme["guaranteed_blocks"] == blocks * 20 // 100 and acme["cap_blocks"] == blocks * 60 // 100
    assert acme["guaranteed_tokens"] == 16 * acme["guaranteed_blocks"]
    assert "default" in rows


def test_as_many_tenants_of_a_profile_fit_as_their_blocks_do(config: str, tmp_path: Path) -> None:
    picture = tmp_path / "tenants.svg"
    found = sized(config, "--tenant-profile", "8x4095", "--plot", str(picture))
    profile = found["tenant_profile"]
    assert profile["bytes"] == 8 * 256 * BLOCK
    assert profile["fit"] == found["kv_bytes"] // (8 * 256 * BLOCK)
    assert profile["by_tokens"][3] == {"tokens": 4095, "fit": profile["fit"]}
    drawn = ElementTree.fromstring(picture.read_text())
    assert drawn.tag == "{http://www.w3.org/2000/svg}svg"
    assert len([node for node in drawn if node.tag.endswith("rect")]) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tenant-profile", "8"], "write SESSIONSxTOKENS"),
        (["--tenant-profile", "0x5"], "write SESSIONSxTOKENS"),
        (["--plot", "x.svg"], "give --tenant-profile"),
        (["--policy", "no-such-policy"], "cannot read policy"),
    ],
)
def test_what_does_not_work_out_is_refused(config: str, options: list[str], message: str) -> None:
    run = CliRunner().invoke(app, [config, "--gpu-memory", "80GiB", *options])
    assert run.exit_code != 0 and message in (run.output + str(run.exception))


def test_what_vllm_makes_of_the_memory_is_told(config: str) -> None:
    found = sized(config)
    assert found["engine"]["blocks"] == found["blocks"] == found["kv_bytes"] // BLOCK
