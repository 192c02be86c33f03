"""The demonstration on transformers: what it says, and that it says otherwise where a defence or a leak is missing."""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any

import pytest
import typer
from rich.console import Console
from transformers.generation.continuous_batching import offloading_manager
from typer.testing import CliRunner

from kvcustody.console.command import CustodyGroup
from kvcustody.kernels.host import HostRows
from kvcustody.testkit.demo import run as demonstration
from kvcustody.testkit.demo.attacks import Attack, AttackOutcome, own_reuse, probe, residual_read
from kvcustody.testkit.demo.codebook import Codebook
from kvcustody.testkit.demo.command import EPILOG, print_report
from kvcustody.testkit.demo.command import attack as attack_command
from kvcustody.testkit.demo.deployment import Deployment
from kvcustody.testkit.demo.engine import ATTACKER, VICTIM
from kvcustody.testkit.demo.run import AttackReport
from kvcustody.testkit.demo.transformers_engine import TransformersDemoEngine
from kvcustody.testkit.demo.vocabulary import draw_secret, note, token_ids

pytestmark = pytest.mark.system

SECRET = draw_secret(Random(3))
app = typer.Typer(cls=CustodyGroup)
demo = typer.Typer(cls=CustodyGroup)
demo.callback()(lambda: None)
demo.command("attack", epilog=EPILOG)(attack_command)
app.add_typer(demo, name="demo")  # as `kvcustody` does where the testkit is installed


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The command, run once as a user runs it; its scratch folder is looked at afterwards."""
    scratch = tmp_path_factory.mktemp("scratch")
    before = tempfile.tempdir
    tempfile.tempdir = str(scratch)
    os.environ["KVCUSTODY_PROFILE"] = "strict"  # of some deployment; none of the demonstration's business
    torch = offloading_manager.torch
    try:
        result = CliRunner().invoke(app, ["demo", "attack", "--seed", "3", "--json"])
        assert os.environ["KVCUSTODY_PROFILE"] == "strict"
    finally:
        tempfile.tempdir = before
        del os.environ["KVCUSTODY_PROFILE"]
    assert list(scratch.iterdir()) == []
    assert offloading_manager.torch is torch
    return result


@pytest.fixture(scope="module")
def plain() -> Iterator[TransformersDemoEngine]:
    engine = TransformersDemoEngine()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def book(plain: TransformersDemoEngine) -> Codebook:
    return Codebook.learn(plain)


@pytest.fixture
def governed(tmp_path: Path) -> Iterator[TransformersDemoEngine]:
    engine = TransformersDemoEngine(Deployment(tmp_path / "deployment"))
    yield engine
    engine.close()


def test_the_plain_engine_gives_everything_away_and_the_governed_one_nothing(result: Any) -> None:
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["verdict"] == "held" and document["secret"] == list(SECRET)
    assert len(document["attacks"]) == 4
    for attack in document["attacks"]:
        assert attack["plain"]["words"] == list(SECRET), attack
        assert attack["governed"]["words"] == [] and attack["governed"]["text"] == "", attack
        assert attack["verdict"] == "held"
    residue, host = document["attacks"][2:]
    assert residue["plain"]["residue_bytes"] > 5_000 and residue["governed"]["residue_bytes"] == 0
    assert residue["plain"]["text"] == " ".join(note(SECRET))
    assert "cpu_offload_space" in host["governed"]["refused"]
    assert document["own_reuse"] == {"cached_tokens": 48, "cacheable_tokens": 48}


def test_an_engine_whose_scrub_does_nothing_is_found_out(governed: TransformersDemoEngine, book: Codebook) -> None:
    assert governed._governed is not None
    (memory,) = governed._governed.custody.blocks.memories
    for table in memory.tables:  # what is zeroed and read back is a copy
        table.words = tuple(words.clone() for words in table.words)
        table.rows = HostRows(table.words)
    left = residual_read(governed, SECRET, book)
    assert left.words == SECRET
    assert Attack("", "", left, left).verdict == "leaked"


def test_an_engine_that_takes_all_tenants_for_one_is_found_out(
    governed: TransformersDemoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = governed.submit
    monkeypatch.setattr(governed, "submit", lambda tenant, *rest: submit(VICTIM, *rest))
    probed = probe(governed, SECRET, 3)
    assert probed.by_metadata.words == probed.by_cost.words == SECRET


def test_an_attack_that_works_on_neither_engine_is_void(
    plain: TransformersDemoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcustody.testkit.demo.transformers_engine.NEW_TOKENS", 1)
    submit = plain.submit
    monkeypatch.setattr(plain, "submit", lambda tenant, prompt: submit(tenant, prompt, 1))  # publishes nothing
    nothing = probe(plain, draw_secret(Random(4)), 4).by_metadata
    assert not nothing.gave_away
    assert Attack("", "", nothing, nothing).verdict == "void"


def test_what_a_victim_reuses_itself_is_measured(plain: TransformersDemoEngine) -> None:
    words = draw_secret(Random(5))
    assert own_reuse(plain, words) == (0, 48)
    assert own_reuse(plain, words) == (48, 48)


def test_a_block_reads_as_what_was_written_and_nothing_else(plain: TransformersDemoEngine, book: Codebook) -> None:
    (served,) = plain.serve(VICTIM, [token_ids(note(SECRET))])
    assert [word for word in book.read(served.left) if word][: len(note(SECRET))] == list(note(SECRET))
    assert book.read(served.left * 0) == [None] * plain.block_tokens
    assert book.read(served.left[::-1].copy()).count(None) >= plain.block_tokens - 1


# -- what is concluded ------------------------------------------------------------------------------------------------

ALL = AttackOutcome(SECRET, " ".join(SECRET))
NOTHING = AttackOutcome()
RESIDUE = AttackOutcome(residue_bytes=1)
CLEAN = AttackOutcome(residue_bytes=0)
REFUSED = AttackOutcome(refused="not here")


def report(*pairs: tuple[AttackOutcome, AttackOutcome], own: int = 48) -> AttackReport:
    attacks = tuple(Attack("attack", "sees", plain, governed) for plain, governed in pairs)
    return AttackReport("transformers", {}, 3, SECRET, 16, attacks, (own, 48), None, 1.0)


CONCLUSIONS = [
    (report((ALL, NOTHING), (RESIDUE, REFUSED)), "held", 0),
    (report((ALL, NOTHING), (RESIDUE, CLEAN)), "held", 0),
    (report((ALL, NOTHING), (RESIDUE, NOTHING)), "void", 1),  # the block was never handed out again
    (report((ALL, NOTHING), (NOTHING, NOTHING)), "void", 1),
    (report((ALL, NOTHING), (NOTHING, REFUSED)), "void", 1),
    (report((ALL, NOTHING), (RESIDUE, RESIDUE)), "leaked", 1),
    (report((ALL, NOTHING), (NOTHING, ALL)), "leaked", 1),
    (report((NOTHING, NOTHING), (ALL, ALL)), "leaked", 1),
    (report((ALL, NOTHING), own=0), "void", 1),
]


@pytest.mark.parametrize(("made", "verdict", "code"), CONCLUSIONS)
def test_what_may_be_concluded(made: AttackReport, verdict: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demonstration, "demonstrate", lambda *given: made)
    shown = CliRunner().invoke(app, ["demo", "attack"])
    assert shown.exit_code == code
    assert f"{verdict}: " in shown.stdout
    assert json.loads(CliRunner().invoke(app, ["demo", "attack", "--json"]).stdout)["verdict"] == verdict


def test_both_engines_stand_side_by_side() -> None:
    console = Console(width=160, file=StringIO())
    print_report(report((ALL, NOTHING), (AttackOutcome(SECRET, "said so", 77), RESIDUE)), console)
    text = console.file.getvalue()
    assert f'"{" ".join(SECRET)}", 3 of 3 words' in text and "0 of 3 words" in text
    assert '77 bytes not zero; they say: "said so"' in text


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_an_engine_that_is_not_installed(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == engine else find(name))
    shown = CliRunner().invoke(app, ["demo", "attack", "--engine", engine])
    assert shown.exit_code == 2
    assert shown.stderr.startswith(f"error: KVC100: {engine} is not installed") and "pip install" in shown.stderr
    assert len(shown.stderr.strip().splitlines()) == 1


def test_help_teaches() -> None:
    shown = CliRunner().invoke(app, ["demo", "attack", "--help"])
    assert "kvcustody demo attack --engine vllm" in shown.stdout and "Exit code 0" in shown.stdout


def test_the_attacker_is_not_the_victim() -> None:
    assert ATTACKER != VICTIM
