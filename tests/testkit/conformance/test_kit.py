"""The kit itself: verdicts, skips with reasons, seeds, reports, the command line."""

import json

import pytest
import typer
from typer.testing import CliRunner

from kvcustody.errors import ConfigError
from kvcustody.testkit.conformance import ALL, BY_NAME, Case, run
from kvcustody.testkit.conformance.case import Bench, case, expect, person
from kvcustody.testkit.conformance.command import conformance
from kvcustody.testkit.conformance.engines.reference_engine import ReferenceEngine
from kvcustody.testkit.conformance.kit import SEED

SOME = [BY_NAME["scope/look-up"], BY_NAME["scope/prefetch"]]
MODULE = "kvcustody.testkit.conformance"


class Lacking(ReferenceEngine):
    """A reference engine that says it has no tier."""

    @property
    def capabilities(self):
        return super().capabilities._replace(lacks={"tier": "it was not built"})


class Mistaken(ReferenceEngine):
    """One that lacks what nobody knows."""

    @property
    def capabilities(self):
        return super().capabilities._replace(lacks={"wings": "it is no bird"})


class Raising(ReferenceEngine):
    """One that breaks when a request arrives."""

    def submit(self, ask):
        raise RuntimeError("no space left")


class Unsound(ReferenceEngine):
    """One whose own checks find something."""

    closed = 0

    def check(self):
        return ["two tables name block 3"]

    def close(self):
        Unsound.closed += 1
        super().close()


def test_an_engine_whose_checks_fail_is_closed_too():
    Unsound.closed = 0
    bench = Bench(Unsound, SEED)
    bench.open()
    with pytest.raises(AssertionError, match="two tables"):
        bench.close()
    assert not Unsound.closed
    bench.abandon()
    assert Unsound.closed == 1


def test_a_case_is_skipped_with_the_engines_own_reason():
    seen = []
    report = run(Lacking, SOME, seen.append)
    assert [(one.case, one.verdict, one.reason) for one in report.verdicts] == [
        ("scope/look-up", "pass", ""),
        ("scope/prefetch", "skip", "no tier: it was not built"),
    ]
    assert tuple(seen) == report.verdicts
    assert report.passed


def test_an_unknown_lack_is_refused():
    report = run(Mistaken, SOME[:1])
    assert not report.passed
    assert "wings" in report.verdicts[0].reason


def test_whatever_an_engine_raises_fails_the_case():
    report = run(Raising, SOME[:1])
    assert report.verdicts[0].verdict == "fail"
    assert "no space left" in report.verdicts[0].reason


def test_an_engine_that_runs_no_case_has_not_passed():
    assert not run(Lacking, [BY_NAME["scope/prefetch"]]).passed


def test_an_unknown_need_is_refused():
    with pytest.raises(ConfigError, match="wings"):
        case("flight/up", "wings")


def test_every_case_says_what_it_proves_and_has_its_place():
    assert len(ALL) >= 40
    for one in ALL:
        assert one.proves.endswith("."), one.name
        assert one.name.count("/") == 1


def test_a_dirty_engine_fails_a_case_that_looked_at_something_else():
    """Checks and scans of every engine that a case opened are part of its verdict."""

    def forgets_a_release(bench: Bench) -> None:
        rig = bench.open()
        rig.until_running(rig.submit(person("alpha"), rig.prompt(3), 9))
        rig.engine.port.release(next(iter(rig.engine.port.running.values())))

    report = run(ReferenceEngine, [Case("own/release", "It does not matter.", (), forgets_a_release)])
    assert report.verdicts[0].verdict == "fail"
    assert "scan" in report.verdicts[0].reason or "check" in report.verdicts[0].reason


def test_one_seed_asks_the_same_and_another_something_else():
    def prompts(seed: int) -> list[tuple[int, ...]]:
        asked = []

        def keep(bench: Bench) -> None:
            rig = bench.open()
            asked.append(rig.prompt(3))
            expect(rig.ask(person("alpha"), asked[0]).state == "finished", "it runs")

        assert run(ReferenceEngine, [Case("own/prompt", "It does not matter.", (), keep)], seed=seed).passed
        return asked

    assert prompts(5) == prompts(5) != prompts(6)


def test_the_report_is_json_with_its_seed():
    body = json.loads(run(Lacking, SOME, seed=7).to_json())
    assert body["schema"] == "kvcustody/conformance@1"
    assert body["counts"] == {"pass": 1, "fail": 0, "skip": 1}
    assert {one["seed"] for one in body["cases"]} == {7}


APP = typer.Typer()
APP.command()(conformance)


def test_the_command_line():
    asked = ["--engine", f"{MODULE}.engines.reference_engine:ReferenceEngine", "--case", "scope/look-up"]
    done = CliRunner().invoke(APP, [*asked, "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["passed"] is True
    assert "pass scope/look-up" in done.stderr
    done = CliRunner().invoke(APP, asked)
    assert done.exit_code == 0 and f"seed {SEED}" in done.stdout


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--engine", f"{MODULE}.engines.reference_engine:no_such_engine"], "no_such_engine"),
        (["--engine", "m:f", "--case", "scope/nothing"], "no case `scope/nothing`"),
        (["--engine", "m:f", "--subject", "m:C"], "belong together"),
    ],
)
def test_the_command_line_says_what_is_not_there(asked, said):
    done = CliRunner().invoke(APP, asked)
    assert isinstance(done.exception, ConfigError) and said in str(done.exception)
