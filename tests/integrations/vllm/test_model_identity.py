"""Equal weights have one identity in every process; weights that were loaded anew have one of nobody else's."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcustody.governance.identity.content_digest import file_facts
from kvcustody.integrations.vllm.model_identity import Models, changes_weights
from kvcustody.integrations.vllm.worker import loaded_adapters


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
    identity, other = process(weights), process(weights)
    for each in (identity, other):
        each.reloaded()
    found = [each.of(of).digest for each in (identity, other, process(weights)) for of in (None, adapter)]
    assert len(set(found)) == len(found)
    again = identity.of(None).digest
    identity.reloaded()
    assert identity.of(None).digest != again


def test_an_adapter_that_was_loaded_anew_is_nobody_elses(weights: Path, adapter: Any) -> None:
    one, other, third = process(weights), process(weights), process(weights)
    before = one.of(adapter).digest
    adapter.load_inplace = True
    found = {each.of(adapter).digest for each in (one, other)}
    adapter.load_inplace = False
    assert len(found | {before}) == 3 and third.of(adapter).digest == before, "control: it is the same there"


def test_files_that_changed_are_other_weights_to_the_next_process(weights: Path, adapter: Any) -> None:
    identity = process(weights)
    changed(adapter.lora_path)
    next_one = process(weights)
    assert next_one.of(None).digest == identity.of(None).digest, "control: nothing else has changed"
    first = process(weights).of(adapter).digest
    assert next_one.of(adapter).digest == first
    changed(weights)
    assert process(weights).of(None).digest != identity.of(None).digest


def read(models: Models, adapter: Any) -> None:
    """A worker reads the adapter's files as they are."""
    models.read_by_worker(adapter.lora_int_id, adapter.lora_path, file_facts(adapter.lora_path))


def test_an_adapter_whose_files_are_rewritten_is_another_from_the_next_request_on(weights: Path, adapter: Any) -> None:
    identity = process(weights)
    before = identity.of(adapter)
    read(identity, adapter)
    assert identity.of(adapter) == before, "control: nothing has changed"
    changed(adapter.lora_path)
    first, second = identity.of(adapter), identity.of(adapter)
    assert len({before, first, second}) == 3, "whose weights a step has is not known: each is alone"
    read(identity, adapter)
    after = identity.of(adapter)
    assert after == identity.of(adapter) and after not in {before, first, second}


def test_files_of_the_same_size_and_time_are_told_apart_while_the_engine_runs(weights: Path, adapter: Any) -> None:
    one, path = process(weights), Path(adapter.lora_path, "weights")
    before, stat = one.of(adapter), path.stat()
    path.unlink()
    path.write_bytes(b"2")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert one.of(adapter) != before


def test_an_adapter_that_a_worker_reads_anew_is_reached_by_no_earlier_key(weights: Path, adapter: Any) -> None:
    """Files are rewritten between a request and the step that reads them: what the request left is found by nobody."""
    identity = process(weights)
    before, changes = identity.of(adapter), identity.changes
    changed(adapter.lora_path)
    read(identity, adapter)
    assert identity.of(adapter) != before and identity.changes > changes, "those that wait are admitted again"
    same = identity.of(adapter)
    read(identity, adapter)
    assert identity.of(adapter) == same, "control: read again, unchanged"


def test_files_that_change_while_they_are_read_are_nobodys(
    weights: Path, adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(manager: object, lora_request: Any) -> str:
        changed(lora_request.lora_path)
        return "weights"

    one, load_noted = process(weights), loaded_adapters.noting_loads(load)
    one.of(adapter)
    assert load_noted(None, adapter) == "weights"
    for told in loaded_adapters.take_loaded():
        one.read_by_worker(*told)
    assert one.of(adapter) != one.of(adapter), "nothing is shared until they were read as they are"
    assert loaded_adapters.take_loaded() == []


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("reload_weights", True),
        ("update_weights", True),
        ("finish_weight_update", True),
        ("start_weight_update", True),
        ("compute_weight_checksums", False),
        ("get_weight_version", False),
        ("block_residue", False),
        (changed, False),
    ],
)
def test_calls_that_may_change_weights_are_known_by_name(method: object, changes: bool) -> None:
    assert changes_weights(method) is changes
