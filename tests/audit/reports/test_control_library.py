"""The control library: cited sections carry evidence, and a user's own framework is read, used and identified."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from kvcustody.audit.reports.build_report import build_report, newest_checkpoint, period
from kvcustody.audit.reports.framework import (
    NAMES,
    Framework,
    load_framework,
    read_framework,
    refused_words,
    showings,
)
from kvcustody.audit.reports.given import PolicyProof
from kvcustody.audit.reports.model import Report
from kvcustody.audit.reports.parameters import ReportParameters
from kvcustody.audit.reports.section import citations
from kvcustody.audit.reports.sections import controls
from kvcustody.audit.reports.sections.controls import carrying_sections, control_statuses
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.verify.documents.document_check import is_unchecked
from kvcustody.errors import ConfigError
from kvcustody.migrations.upgrade import upgrade
from standins.audit.documents import report_again, verify_report
from standins.audit.ledgers import report_ledger
from standins.console.read_page import Table, page_of

OWN = """
id = "our-rules"
title = "Our rules"
edition = "3"
ids_from = "the handbook"
ids_taken = "2026-11"
controls = [
  { id = "R1", title = "Caches are emptied", shows = ["disposal", "erasure"] },
  { id = "R2", title = "Doors are locked", scope = "not-ours", limit = "Doors are the operator's." },
]
"""


class Ledger:
    def __init__(self, engine: Engine, folder: Path, key: Any) -> None:
        self.engine, self.vkey = engine, str(key.verifier)

    def report(
        self, name: str, framework: Framework | None = None, proof: PolicyProof | None = None, **more: Any
    ) -> Report:
        with self.engine.connect() as connection:
            size = newest_checkpoint(connection)
            asked = ReportParameters(name, size, *period(connection, size, None, None), sample=3)
            asked = asked._replace(**more)
            made = build_report(connection, asked, framework=framework, proof=proof)
            return report_ledger.signed(connection, made)


@pytest.fixture(scope="module")
def ledger(world_class: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    folder = tmp_path_factory.mktemp("library")
    engine = open_store(folder / "ledger.db")
    upgrade(engine)
    yield Ledger(engine, folder, report_ledger.fill(engine, world_class, folder))
    engine.dispose()


def statuses(report: Report) -> dict[str, str]:
    return {each.control: each.status for each in report["statuses"]}


def test_every_edition_says_where_its_ids_are_from_and_every_showing_is_used() -> None:
    used: set[str] = set()
    for name in NAMES:
        found = load_framework(name)
        assert found.ids_from and found.ids_taken and found.edition
        used |= {each.name for control in found.controls for each in control.shows}
    assert used == set(showings())
    for each in showings().values():
        assert each.needs and set(each.needs + each.also) <= citations().keys() and not refused_words(each.supports)


@pytest.mark.parametrize("name", sorted(showings()))
def test_a_showing_says_what_sections_show_and_nothing_of_what_happened(name: str) -> None:
    sentences = showings()[name].supports.removesuffix(".").split(". ")
    assert sentences[0].startswith("Shows ")
    assert max(len(each.split()) for each in sentences) <= 25


def test_a_control_names_its_sections_as_the_contents_do(ledger: Ledger) -> None:
    page = page_of(ledger.report("soc2"))
    titles = [f"{number}. {section.title}" for number, section in enumerate(page.sections, 1)]
    (table,) = [
        block
        for block in page.section("Controls").blocks
        if isinstance(block, Table) and block.headings[0] == "control"
    ]
    cited = {row[0].split()[0]: row[3].split("; ") for row in table.rows if row[3]}
    assert len(cited) > 5 and {title for each in cited.values() for title in each} <= {*titles}
    assert "8. Coverage and timeliness" in cited["C1.2"], "what is read back is printed there"


SOURCES = (
    *("CISO Assistant", "Prowler", "OSCAL catalog", "isms.online", "cyberday.ai", "ccToolbox", "AICM Atlas"),
    *("OWASP/AISVS on GitHub", "published by OWASP", "summarised by NIST", "45 CFR"),
)


def lacking(framework: Framework) -> list[str]:
    """What an edition does not say of its ids."""
    problems = []
    if not re.fullmatch(r"20[0-9]{2}-(0[1-9]|1[0-2])(-[0-3][0-9])?", framework.ids_taken):
        problems.append("no date")
    if not any(source in framework.ids_from for source in SOURCES):
        problems.append("no source that can be opened")
    if "verified" in f"{framework.edition} {framework.ids_from}":
        problems.append("ids that were not looked up")
    if (
        "from knowledge" in framework.ids_from
        and "found" not in framework.ids_from
        and "show it" not in framework.ids_from
    ):
        problems.append("ids from knowledge, without what was looked for")
    return problems


@pytest.mark.parametrize("name", NAMES)
def test_every_edition_names_a_source_that_can_be_opened_and_a_date(name: str) -> None:
    found = load_framework(name)
    assert lacking(found) == []
    assert lacking(found._replace(ids_taken="lately")) == ["no date"]
    assert lacking(found._replace(ids_from="a clause, from knowledge"))[0].startswith("no source")
    assert "ids that were not looked up" in lacking(found._replace(edition="2; its ids are not verified here"))


def test_the_ai_controls_matrix_is_mapped_by_its_own_ids() -> None:
    found = {control.id: control for control in load_framework("csa-aicm").controls}
    assert {"AIS-14", "I&S-06", "DSP-16", "LOG-09"} <= set(found) and "IVS-06" not in found
    assert "IVS-06" in {control.id for control in load_framework("csa-ccm").controls}


def test_the_verification_standard_is_mapped_by_its_requirements() -> None:
    """5.5.5 of the drafts is not in 1.0; its chapter on vector stores is no evidence of ours."""
    found = {control.id: control for control in load_framework("owasp-aisvs").controls}
    assert {"C3.3.3", "C4.2.4", "C5.2.7", "C5.3.1", "C5.3.2"} <= set(found) and "C5.5.5" not in found
    assert {name for name, control in found.items() if not control.shows} == {"C3.3.3", "C5.3.2", "C8"}
    assert len(re.findall(r"[0-9a-f]{64}", load_framework("owasp-aisvs").ids_from)) == 3


def test_the_dates_of_the_ai_act_are_those_of_the_omnibus() -> None:
    act = load_framework("eu-ai-act")
    for date in ("2 December 2027", "2 August 2028", "2 August 2026"):
        assert date in act.edition
    assert "was not seen" in act.ids_from and "was not seen" in load_framework("csa-aicm").ids_from


@pytest.mark.parametrize("name", NAMES)
def test_only_sections_that_carry_evidence_are_cited(ledger: Ledger, name: str) -> None:
    report = ledger.report(name, recount=False)
    carrying = carrying_sections(report)
    assert {control.id for control in report.framework.controls} == set(statuses(report))
    for each in report["statuses"]:
        assert set(each.sections) <= carrying
        assert bool(each.sections) is (each.status == "evidence present")
    assert "recount" not in carrying and "proof" not in carrying


def test_what_was_wrong_is_put_right(ledger: Ledger) -> None:
    controls = {control.id: (name, control) for name in NAMES for control in load_framework(name).controls}
    assert "own data" in controls["A1.1.2"][1].title and "resources" in controls["A1.1.3"][1].title
    assert [each.name for each in controls["Art. 12(2)"][1].shows] == ["monitoring"]
    assert controls["FDP_RIP.2"][1].scope == controls["AU-10"][1].scope == "not-addressed"
    assert {
        *("MP-6", "SI-12", "CM-3", "A.8.3", "A.8.16", "P4.2", "P4.3", "CC6.2", "Art. 5(2)", "Art. 12(3)"),
        *("Art. 15", "Art. 18", "Art. 19", "Art. 28", "Art. 30(2)", "164.310(d)(2)(i)", "164.310(d)(2)(ii)"),
        *("A1.1.1", "Art. 15(5)", "Art. 26(6)"),
    } <= set(controls)


def test_a_status_follows_from_what_the_period_has(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    nist = ledger.report("nist-800-53")
    found = statuses(nist)
    assert (found["AC-4(21)"], found["SC-28"], found["SC-12"]) == ("none in the period",) * 3
    assert (found["SC-39"], found["AU-10"]) == ("not ours", "not addressed")
    assert found["SC-4"] == found["AC-3"] == "evidence present"
    [policy] = nist["boundary"].policies
    proof = PolicyProof(policy.name, policy.digest, True, False, "00", ())
    assert statuses(ledger.report("nist-800-53", proof=proof))["AC-4(21)"] == "evidence present"
    failed = proof._replace(holds=False)
    assert statuses(ledger.report("nist-800-53", proof=failed))["AC-4(21)"] == "none in the period"
    early = nist.asked.since_us - 10_000_000
    nothing = ledger.report("nist-800-53", since_us=early, until_us=early + 1_000_000)
    assert set(statuses(nothing).values()) <= {"none in the period", "not ours", "not addressed"} | (
        {"evidence present"} if nothing["boundary"].policies else set()
    )
    assert statuses(nothing)["SI-12"] == statuses(nothing)["AU-12"] == "none in the period"
    # The control: where every section counts, empty ones are cited.
    monkeypatch.setattr(controls, "carrying_sections", lambda _: frozenset(citations()))
    assert {each.status for each in control_statuses(nothing) if each.control == "AC-4(21)"} == {"evidence present"}


def test_a_status_that_somebody_changed_is_found(ledger: Ledger) -> None:
    report = ledger.report("nist-800-53")
    first = report["statuses"][0]._replace(status="not ours")
    with ledger.engine.connect() as connection:
        bare = report.replace(signature=None, statuses=(first, *report["statuses"][1:]))
        forged = report_ledger.signed(connection, bare)
    problems = verify_report(forged.to_bytes(), [ledger.vkey]).problems
    assert any(problem.startswith("Controls: the facts are not those that follow") for problem in problems)
    assert verify_report(report.to_bytes(), [ledger.vkey]).ok, "control"


def test_a_framework_of_a_users_own_is_used_and_listed_as_unchecked(ledger: Ledger) -> None:
    report = ledger.report("our-rules", read_framework(OWN))
    assert statuses(report) == {"R1": "evidence present", "R2": "not ours"}
    assert "--framework our-rules.toml" in report.rerun()
    assert any("file that the preparer gave" in text for text in report["limitations"])
    with ledger.engine.connect() as connection:
        again = report_again(connection, report, [ledger.vkey])
    for found in (
        verify_report(report.to_bytes(), [ledger.vkey]),
        verify_report(report.to_bytes(), [ledger.vkey], source=again),
    ):
        assert found.ok, found.problems
        assert is_unchecked("framework.controls[0].title", found.unchecked)
    library = verify_report(ledger.report("gdpr").to_bytes(), [ledger.vkey])
    assert not is_unchecked("framework.controls[0].title", library.unchecked), "control"
    named = report.replace(asked=report.asked._replace(framework="other"), signature=None)
    with ledger.engine.connect() as connection:
        data = report_ledger.signed(connection, named).to_bytes()
    assert any("not `other`" in problem for problem in verify_report(data, [ledger.vkey]).problems)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (('"disposal", ', '"disposl", '), "control `R1`: `disposl` is none of.*did you mean `disposal`"),
        (('id = "R2"', 'id = "R1"'), "control `R1` is there twice"),
        ((', limit = "Doors are the operator\'s."', ""), "control `R2`: .*needs the reason in `limit`"),
        (('scope = "not-ours"', 'scope = "theirs"'), "control `R2`: scope `theirs` is none of"),
        (('shows = ["disposal", "erasure"]', "shows = []"), "control `R1`: .*needs `shows`"),
        (('title = "Caches are emptied"', 'name = "x"'), "control `R1`: `name` is no part of a control"),
        (("Caches are emptied", "Caches are compliant"), "control `R1`: `compliant`"),
        (('edition = "3"', ""), "it has no text `edition`"),
        (('id = "our-rules"', 'id = "gdpr"'), "`gdpr` is the id of a library framework"),
        (('id = "our-rules"', 'id = "Our rules"'), "`id` is lower-case"),
        (("controls = [", "controls = ["[:-1]), "framework file: "),
    ],
)
def test_a_framework_that_is_none_says_where(change: tuple[str, str], said: str) -> None:
    assert read_framework(OWN).controls[0].id == "R1", "control"
    with pytest.raises(ConfigError, match=said):
        read_framework(OWN.replace(*change))
