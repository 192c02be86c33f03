"""The record of a conformance run vouches for one class's code, for all cases, and for nothing that was edited."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kvcustody.errors import ConfigError
from kvcustody.integrations.vllm.conformance_record import (
    CASES,
    CASES_OF_THE_TIER,
    FAIL,
    PASS,
    SKIP,
    check_record,
    digest_of,
    subject_of,
)
from kvcustody.testkit.conformance import BY_NAME, CaseVerdict, ConformanceReport, run
from kvcustody.testkit.conformance.cases import ALL
from kvcustody.testkit.conformance.command import conformance
from kvcustody.testkit.conformance.engines.reference_engine import ReferenceEngine
from kvcustody.testkit.conformance.engines.reference_tier import ReferenceTier
from kvcustody.testkit.conformance.report import record

TIER_CASE = next(case.name for case in ALL if "tier" in case.needs)


APP = typer.Typer()
APP.command()(conformance)


def passed() -> ConformanceReport:
    return ConformanceReport("an engine", tuple(CaseVerdict(case.name, PASS, "", 0.1, 1) for case in ALL))


def written(folder: Path, report: ConformanceReport) -> tuple[str, str]:
    data = record(report, subject_of(ReferenceTier))
    path = folder / "record.json"
    path.write_bytes(data)
    return str(path), digest_of(data)


def with_verdict(report: ConformanceReport, name: str, verdict: str) -> ConformanceReport:
    changed = [replace(one, verdict=verdict) if one.case == name else one for one in report.verdicts]
    return ConformanceReport(report.engine, tuple(changed))


def test_a_passed_run_vouches_for_its_class(tmp_path: Path) -> None:
    check_record(*written(tmp_path, passed()), ReferenceTier)


def test_an_edited_record_is_another_one(tmp_path: Path) -> None:
    path, digest = written(tmp_path, with_verdict(passed(), TIER_CASE, FAIL))
    Path(path).write_bytes(record(passed(), subject_of(ReferenceTier)))
    with pytest.raises(ConfigError, match="the setting names"):
        check_record(path, digest, ReferenceTier)


@pytest.mark.parametrize("field", ["name", "version", "source_sha256"])
def test_other_code_is_not_vouched_for(tmp_path: Path, field: str) -> None:
    data = record(passed(), replace(subject_of(ReferenceTier), **{field: "other"}))
    path = tmp_path / "record.json"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=f"is of {field} `other`"):
        check_record(str(path), digest_of(data), ReferenceTier)


@pytest.mark.parametrize(("verdict", "says"), [(FAIL, "failed"), (SKIP, "are of the tier")])
def test_the_tier_must_have_passed(tmp_path: Path, verdict: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_record(*written(tmp_path, with_verdict(passed(), TIER_CASE, verdict)), ReferenceTier)


def test_a_part_of_the_cases_vouches_for_nothing(tmp_path: Path) -> None:
    report = run(ReferenceEngine, [BY_NAME[TIER_CASE]])
    assert report.passed
    with pytest.raises(ConfigError, match="did not run"):
        check_record(*written(tmp_path, report), ReferenceTier)


@pytest.mark.parametrize("content", [b"{}", b"not json", b'{"schema": "other", "subject": {}, "cases": {}}'])
def test_what_is_no_record_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is no `kvcustody/conformance-record@1`"):
        check_record(str(path), digest_of(content), ReferenceTier)


def test_the_engine_knows_the_kits_cases_without_the_kit() -> None:
    assert tuple(case.name for case in ALL) == CASES
    assert tuple(case.name for case in ALL if "tier" in case.needs) == CASES_OF_THE_TIER


@pytest.mark.system
def test_the_command_writes_what_the_setting_names(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    subject = f"{ReferenceTier.__module__}:{ReferenceTier.__qualname__}"
    engine = f"{ReferenceEngine.__module__}:{ReferenceEngine.__qualname__}"
    asked = ["--engine", engine, "--case", TIER_CASE, "--record", str(path), "--subject", subject]
    done = CliRunner().invoke(APP, asked)
    assert done.exit_code == 0
    assert digest_of(path.read_bytes()) in done.stderr
    assert json.loads(path.read_bytes())["subject"]["name"] == subject
