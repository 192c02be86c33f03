"""Equal weights have one identity in every process; weights that were loaded anew have one of nobody else's."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcustody.integrations.vllm.model_identity import Models


def process(weights: Path) -> Models:
    """What a process that begins with these weights knows."""
    model = SimpleNamespace(
        model=str(weights), revision=None, tokenizer=str(weights), tokenizer_revision=None, quantization=None,
        dtype="float16", hf_text_config=SimpleNamespace(),
    )  # fmt: skip
    config: Any = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
    )
    return Models(config, 16)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights").write_bytes(b"1")
    return folder


@pytest.fixture
def adapter(tmp_path: Path) -> Any:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "weights").write_bytes(b"1")
    return SimpleNamespace(lora_name="a", lora_int_id=1, lora_path=str(folder), load_inplace=False)


def changed(folder: str | Path) -> None:
    """Other weights of the same size."""
    path = Path(folder, "weights")
    before = path.stat()
    path.write_bytes(b"2")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000_000))


def test_equal_weights_are_equal_in_every_process(weights: Path, adapter: Any) -> None:
    one, other = process(weights), process(weights)
    assert one.of(None).digest == other.of(None).digest
    assert one.of(adapter).digest == other.of(adapter).digest != one.of(None).digest


def test_weights_that_were_loaded_anew_are_nobody_elses(weights: Path, adapter: Any) -> None:
    """A number that counts would be the same in the next process, and find in files what others computed."""
    one, other = process(weights), process(weights)
    for each in (one, other):
        each.reloaded()
    found = [each.of(of).digest for each in (one, other, process(weights)) for of in (None, adapter)]
    assert len(set(found)) == len(found)
    again = one.of(None).digest
    one.reloaded()
    assert one.of(None).digest != again


def test_an_adapter_that_was_loaded_anew_is_nobody_elses(weights: Path, adapter: Any) -> None:
    one, other, third = process(weights), process(weights), process(weights)
    before = one.of(adapter).digest
    adapter.load_inplace = True
    found = {each.of(adapter).digest for each in (one, other)}
    adapter.load_inplace = False
    assert len(found | {before}) == 3 and third.of(adapter).digest == before, "control: it is the same there"


def test_files_that_changed_are_other_weights_to_the_next_process(weights: Path, adapter: Any) -> None:
    one = process(weights)
    changed(adapter.lora_path)
    next_one = process(weights)
    assert next_one.of(None).digest == one.of(None).digest, "control: nothing else has changed"
    first = process(weights).of(adapter).digest
    assert next_one.of(adapter).digest == first
    changed(weights)
    assert process(weights).of(None).digest != one.of(None).digest


def test_an_adapters_files_are_read_when_it_is_met_first(weights: Path, adapter: Any) -> None:
    one = process(weights)
    before = one.of(adapter).digest
    changed(adapter.lora_path)
    assert one.of(adapter).digest == before, "the engine has what it loaded"
    assert process(weights).of(adapter).digest != before
