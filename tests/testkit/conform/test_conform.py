"""Public cases asked of our own tier, of products that are not there, and the reports of both."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcustody.console.main import app
from kvcustody.governance.tiers.copies.index import CopyIndex, TierTerms
from kvcustody.governance.tiers.seal_keys import SealKeys
from kvcustody.governance.tiers.stores.host_arena import HostArena
from kvcustody.governance.tiers.tier import SealedTier
from kvcustody.governance.tiers.tier_index import TierIndex
from kvcustody.integrations.identity import authenticate_request, request_body
from kvcustody.testkit.conform.command import TRIED, run_target, script_of
from kvcustody.testkit.conform.comparison import page
from kvcustody.testkit.conform.findings import FOUND, HOLDS, NOT_RUN, CaseFinding, ConformReport
from kvcustody.testkit.conform.public_cases import CASES, LEFT_OUT, TARGET_OF, TARGETS
from kvcustody.testkit.conform.scripts.ours import kvcustody_door, kvcustody_events, kvcustody_tier
from kvcustody.testkit.conformance import ALL

ROOT = Path(__file__).resolve().parents[3]


def conform(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["known-bugs", *words])
    assert result.exit_code == code, result.output
    return result.stdout


HERE = {
    "kvcustody": kvcustody_tier.main,
    "kvcustody-door": kvcustody_door.main,
    "kvcustody-events": kvcustody_events.main,
}


@pytest.mark.parametrize(("target", "case"), [(name, case) for name in HERE for case in TARGET_OF[name].cases])
def test_every_case_holds_here(target: str, case: str) -> None:
    found = HERE[target](case)
    assert found["found"] is False and found["evidence"]


def test_every_case_is_asked_of_a_product_and_of_ours() -> None:
    ours = {case for target in TARGETS if target.name.startswith("kvcustody") for case in target.cases}
    others = {case for target in TARGETS if not target.name.startswith("kvcustody") for case in target.cases}
    assert ours == others == {case.name for case in CASES}


# What is public of bugs of caches, by project: each is a case's, or left out with its reason.
PUBLIC = {
    "vllm-project/vllm": (
        *(
            35219,
            37076,
            41269,
            43990,
            49261,
            49266,
            52784,
            54327,
            54363,
            54727,
            54779,
            55191,
            55904,
            56311,
            56585,
        ),
        "GHSA-rm76-4mrf-v9r8",
    ),
    "nvd.nist.gov": ("CVE-2025-46570",),
    "LMCache/LMCache": (2880, 3301, 3892, 4127, 4456, 4825, 5128),
    "sgl-project/sglang": (15847, 24693, 26747, 32772, 34976, 37160, 38577, 39945),
    "smg-project/smg": (1156, 2137, 2420),
    "kvcache-ai/ktransformers": (2184,),
    "Tanguille/cluster": (4213, 4636),
    "kvcache-ai/Mooncake": (1155, 1527, 2153, 2676, 3231, 3709, 3715, 3940),
    "vllm-project/vllm-ascend": (14823,),
    "ai-dynamo/dynamo": (6101, 8197),
    "llm-d/llm-d-router": (1389, 1445),
    "vllm-project/aibrix": (2329,),
    "NVIDIA/TensorRT-LLM": (13589, 14918, 17631),
}


def test_every_public_report_is_a_case_or_is_left_out_with_a_reason() -> None:
    cited = [source for case in CASES for source in case.sources]
    left_out = [one.source for one in LEFT_OUT]
    assert len(set(left_out)) == len(left_out) and not set(left_out) & set(cited)
    assert all(one.says and one.reason for one in LEFT_OUT)
    numbered = [
        source for source in (*cited, *left_out) if source.rsplit("/", 1)[-1][-4:].isdigit() or "GHSA" in source
    ]
    found = {(source.split("//")[1].removeprefix("github.com/"), source.rsplit("/", 1)[-1]) for source in numbered}
    told = {(project, str(number)) for project, numbers in PUBLIC.items() for number in numbers}
    assert {
        (place.split("/vuln")[0] if "nvd" in place else "/".join(place.split("/")[:2]), number)
        for place, number in found
    } == told
    text = (ROOT / "docs" / "reference" / "measurements" / "other-systems.md").read_text()
    assert all(one.source in text and one.reason in text for one in LEFT_OUT)


def _same_name(self: SealKeys, spec: Any, *, shard: int, layout: bytes) -> Callable[[bytes], bytes]:
    """The defence off: an object is named by its chunk alone."""
    return lambda last: last


def _keep(key: Any, name: bytes, facts: Any, content: Any, into: memoryview, **_: Any) -> int:
    into[len(into) - len(content) :] = content
    return len(into)


def _take(key: Any, name: bytes, facts: Any, sealed: memoryview, into: memoryview) -> None:
    into[:] = sealed[len(sealed) - len(into) :]


@pytest.mark.parametrize("case", ["salt-dropped", "other-model", "model-revision", "rope-scaling"])
def test_a_tier_that_names_by_content_alone_and_asks_nobody_is_found(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The positive control: without names of domains and without what is bound, the same script finds it."""
    monkeypatch.setattr(SealKeys, "namer", _same_name)
    monkeypatch.setattr(TierIndex, "reaches", lambda *_: True)
    monkeypatch.setattr(CopyIndex, "is_known", lambda *_: True)
    first: list[Any] = []
    of = SealKeys.of

    def one_key(self: SealKeys, spec: Any, subject: bytes, bucket: bytes) -> Any:
        first.append(spec)
        return of(self, first[0], subject, bucket)

    monkeypatch.setattr(SealKeys, "of", one_key)
    facts = CopyIndex.facts
    known: list[Any] = []

    def one_fact(self: CopyIndex, *given: Any) -> Any:
        known.append(facts(self, *given))
        return known[0]

    monkeypatch.setattr(CopyIndex, "facts", one_fact)
    assert kvcustody_tier.main(case)["found"] is True


@pytest.mark.parametrize("case", ["renamed-object", "older-object"])
def test_a_tier_that_binds_nothing_is_found(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The positive control: content is kept as it is, and whatever lies under a name is taken for it."""
    monkeypatch.setattr("kvcustody.governance.tiers.tier.seal_into", _keep)
    monkeypatch.setattr("kvcustody.governance.tiers.tier.open_into", _take)
    assert kvcustody_tier.main(case)["found"] is True


def test_a_tier_whose_layout_nobody_tells_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The positive control: every layout is the same one."""
    monkeypatch.setattr(kvcustody_tier, "TierTerms", lambda _, *more, **named: TierTerms(bytes(32), *more, **named))
    assert kvcustody_tier.main("other-layout")["found"] is True


def test_a_tier_that_lets_time_pass_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The positive control: no sweep."""
    monkeypatch.setattr(SealedTier, "expire", lambda self: 0)
    assert kvcustody_tier.main("never-deleted")["found"] is True


def test_names_that_the_prompt_alone_makes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The positive control: an object is named by its chunk alone."""
    monkeypatch.setattr(SealKeys, "namer", _same_name)
    assert kvcustody_tier.main("guessable-name")["found"] is True


def test_content_that_is_kept_as_it_is_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The positive control: nothing is sealed."""
    monkeypatch.setattr("kvcustody.governance.tiers.tier.seal_into", _keep)
    monkeypatch.setattr("kvcustody.governance.tiers.tier.open_into", _take)
    assert kvcustody_tier.main("clear-at-rest")["found"] is True


def test_memory_that_nobody_zeroes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The positive control: a freed extent stays as it was."""
    monkeypatch.setattr(HostArena, "_zero", lambda self, start, length: None)
    assert kvcustody_tier.main("residue")["found"] is True


def test_a_tier_that_does_not_tell_whose_a_copy_is_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The positive control: every owner counts as the tenant that removes everything."""

    class Anybody(str):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = str.__hash__

    end_tenant = SealedTier.end_tenant
    monkeypatch.setattr(SealedTier, "end_tenant", lambda self, tenant: end_tenant(self, Anybody(tenant)))
    assert kvcustody_tier.main("tenant-wipe")["found"] is True


def test_a_tier_that_erases_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The positive control: nobody's copies are an erasure's."""
    monkeypatch.setattr("kvcustody.governance.tiers.copies.ends.may_hold", lambda *_: False)
    assert kvcustody_tier.main("erase-tenant")["found"] is True


def test_a_door_that_knows_neither_header_nor_parameters_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The positive control: what a client names is passed on."""
    monkeypatch.setattr(authenticate_request, "NAMESPACE_HEADER", "x-other")
    assert kvcustody_door.main("tenant-by-own-word")["found"] is True
    monkeypatch.setattr(request_body, "_TRANSFER_FIELDS", ())
    assert kvcustody_door.main("params-end-engine")["found"] is True


@pytest.mark.parametrize("terms", [{"tokens_published": True}])
def test_a_publisher_that_tells_prompts_is_found(monkeypatch: pytest.MonkeyPatch, terms: dict[str, bool]) -> None:
    """The positive control: the publisher is told to publish tokens."""
    heard = kvcustody_events.heard
    monkeypatch.setattr(kvcustody_events, "heard", lambda: heard(**terms))
    assert kvcustody_events.main("events-tell-prompts")["found"] is True


def test_names_of_tenants_and_namespaces_without_a_frame_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The positive control: a name by the tenant's digest, and a namespace of two texts put together."""

    def by_tenant(self: SealKeys, spec: Any, *, shard: int, layout: bytes) -> Callable[[bytes], bytes]:
        return lambda last: hashlib.sha256(spec.tenant.encode()).digest()

    def put_together(self: SealKeys, spec: Any) -> bytes:
        return hashlib.sha256((spec.tenant + (spec.salt or "")).encode()).digest()

    monkeypatch.setattr(SealKeys, "namer", by_tenant)
    assert kvcustody_tier.main("name-tells-tenant")["found"] is True
    monkeypatch.undo()
    monkeypatch.setattr(SealKeys, "domain", put_together)
    assert kvcustody_tier.main("namespace-alias")["found"] is True


@pytest.mark.system("the kit's command cannot run our target")
def test_the_command_runs_our_target_in_a_process_of_its_own(tmp_path: Path) -> None:
    where = [str(tmp_path / name) for name in ("a.html", "a.sarif", "a.json")]
    written = ("--html", where[0], "--sarif", where[1], "--out", where[2])
    report = json.loads(conform("--target", "kvcustody", "--case", "renamed-object", *written, "--json"))
    assert [one["verdict"] for one in report["cases"]] == [HOLDS]
    assert json.loads(Path(where[2]).read_text()) == report
    assert json.loads(Path(where[1]).read_text())["runs"][0]["results"] == []
    assert "<script" not in Path(where[0]).read_text() and "holds" in Path(where[0]).read_text()


def test_a_product_that_is_not_there_could_not_run() -> None:
    target = TARGET_OF["lmcache-aesgcm"]
    report = run_target(target, sys.executable)
    assert {one.verdict for one in report.findings} == {NOT_RUN} and not report.holds
    assert "is not installed" in report.findings[0].evidence
    assert "not run" in conform("--target", target.name, code=3)
    assert {one.verdict for one in run_target(target, "/nowhere/python").findings} == {NOT_RUN}


def test_what_is_found_is_a_result_of_sarif_and_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TARGET_OF["vllm-tiers"]
    found = ConformReport(target, "1", (CaseFinding("model-revision", FOUND, "<b>", "x.py", 0.1),))
    monkeypatch.setattr("kvcustody.testkit.conform.command.run_target", lambda *_: found)
    assert "found" in conform("--target", target.name, code=1)
    [result] = json.loads(found.to_sarif())["runs"][0]["results"]
    assert result["ruleId"] == "model-revision" and not found.holds
    assert "&lt;b&gt;" in found.to_html()


def test_words_that_are_wrong_say_what_there_is() -> None:
    listed = conform("--list")
    assert all(target.name in listed for target in TARGETS)
    assert json.loads(conform("--list", "--json"))[0]["target"] == TARGETS[0].name
    result = CliRunner().invoke(app, ["known-bugs", "--target", "lmcache-aesgm"])
    assert result.exit_code == 2 and "lmcache-aesgcm" in result.output
    result = CliRunner().invoke(app, ["known-bugs", "--target", "vllm-tiers", "--case", "salt-dropped"])
    assert result.exit_code == 2 and "model-revision" in result.output


def test_a_part_that_nobody_tried_is_named_untested(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = {"vllm-tier": ["fs", "obj"], "vllm-connector": "ImportError: no torch"}
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho noise\necho '{json.dumps(said)}'\n")
    python.chmod(0o700)
    listed = conform("--parts", "--python", str(python)).splitlines()
    assert [line.split()[-1] for line in listed[:3]] == ["torch", "vllm-tiers", "untested"]
    assert listed[3] == "3 parts, 1 of them untested"
    assert "no engine" in conform("--parts")
    result = CliRunner().invoke(app, ["known-bugs", "--parts", "--python", "/nowhere/python"])
    assert result.exit_code == 2 and "lists nothing" in result.output


def test_lmcaches_parts_are_named_without_being_loaded(tmp_path: Path) -> None:
    """As LMCache's package has them: each module would need packages that are not there."""
    for folder, names in (
        ("distributed/l2_adapters", ("base", "factory", "fs_l2_adapter", "s3_l2_adapter", "serde_wrapper")),
        ("storage_backend/connector", ("base_connector", "redis_connector", "redis_adapter")),
        ("storage_backend", ("abstract_backend", "gds_backend", "resp_client")),
        ("distributed/serde", ("base", "utils", "aesgcm", "turboquant/__init__")),
    ):
        for name in (*names, "__init__"):
            path = tmp_path / "lmcache/v1" / folder / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("import a_package_that_is_not_there\n")
    (tmp_path / "lmcache/__init__.py").write_text("import a_package_that_is_not_there\n")
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nPYTHONPATH='{tmp_path}' exec '{sys.executable}' -S \"$@\"\n")
    python.chmod(0o700)
    found = json.loads(conform("--parts", "--json", "--python", str(python)))
    assert [(one["registry"], one["name"], bool(one["tried"])) for one in found] == [
        ("lmcache-adapter", "fs_l2_adapter", True),
        ("lmcache-adapter", "s3_l2_adapter", False),
        ("lmcache-backend", "gds_backend", False),
        ("lmcache-connector", "redis_connector", False),
        ("lmcache-serde", "aesgcm", True),
        ("lmcache-serde", "turboquant", False),
    ]


def test_what_tried_a_part_is_a_target_or_the_kit() -> None:
    for tried in TRIED.values():
        target = tried.removeprefix("known-bugs --target ")
        assert target in TARGET_OF or tried.startswith("the conformance kit")


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_every_target_has_a_script_that_runs_by_itself(target: Any) -> None:
    text = script_of(target).read_text()
    assert all(case in text for case in target.cases) and '__name__ == "__main__"' in text
    assert target.name.startswith("kvcustody") or "kvcustody" not in text
    assert conform("--target", target.name, "--script") == text


def test_the_page_says_what_the_records_say() -> None:
    records = ROOT / "benchmarks" / "results" / "conform"
    kept = {path.stem: json.loads(path.read_text()) for path in records.rglob("*.json")}
    assert set(kept) == set(TARGET_OF)
    for name, body in kept.items():
        assert {one["case"] for one in body["cases"]} == set(TARGET_OF[name].cases)
        assert NOT_RUN not in {one["verdict"] for one in body["cases"]}
    kit = ROOT / "benchmarks" / "results" / "conformance-kit"
    assert page(records, kit) == (ROOT / "docs" / "reference" / "measurements" / "other-systems.md").read_text()


def test_every_engine_of_ours_has_a_run_of_the_whole_kit() -> None:
    kit = ROOT / "benchmarks" / "results" / "conformance-kit"
    kept = {path.stem: json.loads(path.read_text()) for path in kit.glob("*.json")}
    assert set(kept) == {"reference", "transformers", "vllm", "lmcache", "lmcache-serde"}
    for body in kept.values():
        verdicts = {one["case"]: one["verdict"] for one in body["cases"]}
        assert set(verdicts) == {case.name for case in ALL} and set(verdicts.values()) <= {"pass", "skip"}
    assert {one["verdict"] for one in kept["reference"]["cases"]} == {"pass"}
