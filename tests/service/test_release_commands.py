"""The steps of a release by `kvcustody policy …` at a control plane: people with a key of the API and one to sign."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from typer.testing import CliRunner

from kvcustody.console.main import app
from standins.service.control_plane_world import APART, ControlPlane


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """The server is in this process: its log would be on the stdout that is read here."""
    for name in list(os.environ):
        assert not name.upper().startswith("KVCUSTODY_S"), name
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.configure(**before)


def _policy(plane: ControlPlane, who: str, *words: str, code: int = 0) -> Any:
    """What `kvcustody policy WORDS` prints for somebody."""
    given = ["--trust", str(plane.folder / "trust.toml"), "--server", plane.address, "--json"]
    given += ["--api-key-file", str(plane.key_file(who))]
    if words[0] not in ("review", "history"):
        given += ["--signing-key", str(plane.signing_file(who))]
    ran = CliRunner().invoke(app, ["policy", *words, *given])
    assert ran.exit_code == code, ran.output
    return json.loads(ran.stdout) if code == 0 else ran.output


@pytest.mark.system("a release needs more than the commands")
def test_a_release_goes_through_a_control_plane_by_commands_alone(plane: ControlPlane) -> None:
    (plane.folder / "apart.yaml").write_text(APART)
    assert "two releases" in _policy(plane, "grace", "history", "--store", "elsewhere", code=2)
    before = _policy(plane, "grace", "history")["active"]
    made = _policy(plane, "ada", "propose", str(plane.folder / "apart.yaml"), "--note", "apart")
    narrow = made["manifest"]["revision"]
    assert narrow > before
    refused = _policy(plane, "ada", "approve", str(narrow), code=2)
    assert "not" in refused.lower(), "who writes does not approve"
    _policy(plane, "grace", "approve", str(narrow))
    _policy(plane, "grace", "activate", str(narrow))
    back = _policy(plane, "ada", "rollback", str(before), "--note", "as it was")["manifest"]["revision"]
    cells = _policy(plane, "grace", "review", str(back))["cells"]
    assert _policy(plane, "grace", "approve", str(back), "--cells", cells)["revision"] == back
    refused = _policy(plane, "grace", "activate", str(back), code=2)
    assert "consent" in refused, "control: it opens the owner's blocks"
    [opened] = _policy(plane, "holger", "consent", str(back), "reads")
    assert (opened["owner"], opened["reader"]) == ("holder", "reader")
    _policy(plane, "grace", "activate", str(back))
    assert _policy(plane, "grace", "history")["active"] == back


@pytest.mark.system("the history of a release names other workers than those that run it")
def test_a_history_says_who_runs_what_is_active(plane: ControlPlane) -> None:
    before = _policy(plane, "grace", "history")
    effect = before["in_effect"]
    assert not effect["at_work"] and [one["workers"] for one in effect["items"]] == [[]]
    with plane.worker():
        effect = _policy(plane, "grace", "history")["in_effect"]
        [one] = effect["items"]
        assert effect["at_work"] and one["workers"] == ["gpu-0"] and one["source"] == "release"
        assert one["revision"] == before["active"]
        answer = CliRunner().invoke(
            app,
            [
                *("policy", "history", "--trust", str(plane.folder / "trust.toml")),
                *("--server", plane.address, "--api-key-file", str(plane.key_file("grace"))),
            ],
        )
        assert "in effect on gpu-0: " in answer.stdout
    assert not _policy(plane, "grace", "history")["in_effect"]["at_work"]


def test_a_record_of_processing_is_of_the_revision_in_effect(plane: ControlPlane) -> None:
    """Whoever answers for the processing names no policy: the control plane knows which one is in effect."""
    asked = ["report", "ropa", "--server", plane.address, "--out", str(plane.folder / "ropa"), "--json"]
    ran = CliRunner().invoke(app, [*asked, "--api-key-file", str(plane.key_file("dora"))])
    assert ran.exit_code == 0, ran.output
    record = json.loads(ran.stdout)["record"]
    assert [(item["owner"], item["reader"], item["by"]) for item in record["recipients"]] == [
        ("holder", "reader", "grant reads")
    ]
    refused = CliRunner().invoke(app, [*asked, "--api-key-file", str(plane.key_file("holger"))])
    assert refused.exit_code == 2, "it names every tenant, so it is not for one of them"
