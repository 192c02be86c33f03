"""`kvcustody demo attack --engine vllm`: what it finds in real engines, and that it ends everything it started."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from kvcustody.testkit.demo.attacks import probe
from kvcustody.testkit.demo.deployment import Deployment
from kvcustody.testkit.demo.vllm_engine import VllmDemoEngine
from kvcustody.testkit.demo.vocabulary import draw_secret, note

COMMAND = [sys.executable, "-m", "kvcustody.console.main", "demo", "attack", "--engine", "vllm", "--json"]
SECONDS = 1200  # many times what it takes: the machine may be busy


def start(scratch: Path) -> tuple[subprocess.Popen[str], str]:
    """The command, and a mark that its processes inherit."""
    mark = f"DEMO_TEST_{secrets.token_hex(8)}"
    environment = os.environ | {mark: "1", "TMPDIR": str(scratch)}
    process = subprocess.Popen(
        COMMAND, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=scratch
    )
    return process, mark


def alive(mark: str) -> list[int]:
    """Processes that were started with the mark in their environment, and have not ended."""
    pids = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                pids.append(int(entry.name))
        except OSError:
            continue
    return pids


def ended(mark: str) -> bool:
    """None is alive; what was killed a moment ago may take one more."""
    until = time.monotonic() + 60
    while alive(mark) and time.monotonic() < until:
        time.sleep(0.05)
    return not alive(mark)


def files(scratch: Path) -> list[Path]:
    """What is left of the demonstration's own; vLLM's libraries keep caches of theirs in the temporary folder."""
    return list(scratch.glob("kvcustody-demo-*"))


@pytest.mark.soak
def test_every_attack_works_on_vllm_as_it_is_and_none_under_governance(tmp_path: Path):
    process, mark = start(tmp_path)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err + out
    document = json.loads(out)
    assert document["verdict"] == "held"
    assert len(document["attacks"]) == 5
    for attack in document["attacks"]:
        assert attack["plain"]["words"] == document["secret"], attack
        assert not attack["governed"]["gave_away"], attack
    residue, tier = document["attacks"][3:]
    assert residue["plain"]["text"] == " ".join(note(tuple(document["secret"])))
    assert residue["plain"]["residue_bytes"] > 1000
    assert residue["governed"]["residue_bytes"] == 0
    assert "`ExampleConnector` keeps KV blocks outside this engine" in tier["governed"]["refused"]
    assert document["own_reuse"] == {"cached_tokens": 96, "cacheable_tokens": 96}
    assert document["own_salts"]["words"] == []
    assert ended(mark), alive(mark)
    assert files(tmp_path) == []


@pytest.mark.soak
def test_ended_in_the_middle_it_leaves_nothing(tmp_path: Path):
    process, mark = start(tmp_path)
    until = time.monotonic() + SECONDS
    while len(alive(mark)) < 3 and time.monotonic() < until:  # itself and two engines
        time.sleep(0.1)
    assert files(tmp_path)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 143, err
    assert "Traceback" not in err
    assert ended(mark), alive(mark)
    assert files(tmp_path) == []


@pytest.fixture
def governed(tmp_path: Path):
    engine = VllmDemoEngine(tmp_path / "engine", Deployment(tmp_path / "deployment"))
    try:
        engine.launch()
        yield engine.ready()
    finally:
        engine.close()


@pytest.mark.soak  # the same probe meets the same door on transformers in `make test-system`
def test_a_door_that_takes_all_tenants_for_one_is_found_out(governed: VllmDemoEngine, monkeypatch: pytest.MonkeyPatch):
    """The probe sees reuse in the governed engine wherever there is any, and none once the keys are their own again."""
    door = governed._gate
    assert door is not None
    secret = draw_secret(Random(9))
    with monkeypatch.context() as confused:
        confused.setattr(door, "_keys", dict.fromkeys(door._keys, door._keys["victim"]))
        probed = probe(governed, secret, 9)
    assert probed.by_metadata.words == probed.by_cost.words == secret
    probed = probe(governed, secret, 9)
    assert probed.by_metadata.words == probed.by_cost.words == ()
