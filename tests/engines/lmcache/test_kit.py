"""The conformance kit over vLLM with LMCache's server: it passes, and with any one defence off it does not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcustody.console.main import app
from kvcustody.integrations.vllm.conformance_record import (
    CASES,
    CASES_OF_THE_TIER,
    FAIL,
    PASS,
    SKIP,
    check_record,
    digest_of,
    load_subject,
)
from kvcustody.integrations.vllm.foreign_connectors import CopiesBeside
from kvcustody.integrations.vllm.scheduler.scheduler_side import SchedulerSide
from kvcustody.integrations.vllm.scheduler.scheduler_state import SchedulerState
from kvcustody.testkit.conformance import BY_NAME
from kvcustody.testkit.conformance.engine_protocol import Setup
from kvcustody.testkit.conformance.kit import capabilities_of, judge
from kvcustody.testkit.lmcache import conformance, deployment
from kvcustody.testkit.lmcache.conformance import LMCacheUnderTest, engine, engine_with_serde
from kvcustody.testkit.lmcache.server import LMCacheServer
from standins.engines.lmcache.lmcache_site import KEPT_RECORD, SUBJECT

pytestmark = pytest.mark.system
ENGINE = "kvcustody.testkit.lmcache.conformance:engine"


@pytest.fixture(autouse=True)
def no_server_is_left() -> Iterator[None]:
    """Whatever a case came to."""
    yield
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    commands = [Path(f"/proc/{child}/cmdline").read_bytes() for child in children]
    assert not [command for command in commands if b"--l2-adapter" in command]


def serve_in_clear(folder: Path, settings: Mapping[str, str]) -> LMCacheServer:
    """LMCache's server with its own adapter for files, and no serde."""
    kept = {"type": "fs", "base_path": str(folder / "tier")}
    tokens = deployment.CHUNK_TOKENS
    return LMCacheServer(folder / "lmcache", settings, kept, "--l2-store-policy", "skip_l1", chunk_tokens=tokens)


def in_clear(setup: Setup) -> LMCacheUnderTest:
    return LMCacheUnderTest(setup, serve_in_clear, "its files in clear")


def one_for_all(first: list[str], salt: Callable[..., str]) -> Callable[..., str]:
    """Whoever asks has the salt of who asked first."""

    def of(salts: Any, residency: Any) -> str:
        first.append(salt(salts, residency))
        return first[0]

    return of


def nothing_kept(view: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, kept=(): view(self)


def test_it_passes_by_one_command_whose_record_is_the_one_kept_here(tmp_path: Path) -> None:
    path = tmp_path / "lmcache.json"
    command = ["conformance", "--engine", ENGINE, "--subject", SUBJECT, "--record", str(path), "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output[-3000:]
    check_record(str(path), digest_of(path.read_bytes()), load_subject(SUBJECT))
    made = json.loads(path.read_bytes())
    assert set(made["cases"]) == set(CASES)
    assert [name for name, verdict in made["cases"].items() if verdict == SKIP] == ["scope/fork"]
    if made["subject"] == (kept := json.loads(KEPT_RECORD.read_bytes()))["subject"]:
        assert made == kept


@pytest.mark.parametrize("case", CASES_OF_THE_TIER)
def test_lmcaches_files_pass_with_our_serde(case: str) -> None:
    verdict = judge(engine_with_serde, BY_NAME[case], capabilities_of(engine))
    assert verdict.verdict == PASS, verdict


def test_a_server_without_serde_does_not_pass_and_has_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conformance, "engine", in_clear)
    path = tmp_path / "lmcache.json"
    command = ["conformance", "--engine", ENGINE, "--subject", SUBJECT, "--record", str(path)]
    result = CliRunner().invoke(app, [*command, "--case", "scope/prefetch"])
    assert result.exit_code == 1 and not path.exists()
    assert "copies-in-clear" in result.output


def test_content_in_clear_is_found_where_nobody_asks_who_seals(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kit's own eyes: the engine's look at who seals is off."""
    monkeypatch.setattr(CopiesBeside, "_look", lambda self: None)
    assert "content lies in clear" in failure("scope/store", in_clear)


@pytest.mark.parametrize("salts", ["none", "one for all"])
def test_salts_that_nobody_governs_do_not_pass(salts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    salt = SchedulerState._salt
    of = one_for_all([], salt) if salts == "one for all" else lambda *_: None
    monkeypatch.setattr(SchedulerState, "_salt", staticmethod(of))
    says = {"none": "nothing is in the tier (control)", "one for all": "foreign tenant, from the tier"}
    assert says[salts] in failure("scope/prefetch", engine)


def test_a_scan_that_does_not_know_of_saves_under_way_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SchedulerState, "view", nothing_kept(SchedulerState.view))
    assert "lost finish" in failure("scope/prefetch", engine)


def test_a_load_that_an_early_word_of_its_saves_ends_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SchedulerSide, "keep_loading", lambda self, output: None)
    assert failure("residue/transfers", engine)


def failure(case: str, factory: Callable[[Setup], LMCacheUnderTest]) -> str:
    """Why a case does not pass."""
    verdict = judge(factory, BY_NAME[case], capabilities_of(engine))
    assert verdict.verdict == FAIL, verdict
    return verdict.reason
