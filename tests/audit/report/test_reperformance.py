"""The auditor's program under examples/ agrees with every figure that it covers, and with none that was changed."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import reperform
import report_ledger
from sqlalchemy import Engine

from kvcustody.audit.database.engine import open_store
from kvcustody.audit.exports.export_writer import write_export
from kvcustody.audit.exports.ledger_source import LedgerSource
from kvcustody.audit.report.build_report import build_report, newest_checkpoint, period
from kvcustody.audit.report.model import ReportParameters
from kvcustody.audit.report.sampling.attribute_size import (
    attribute_sample_size,
    chance_of_at_most,
    upper_limit_ppm,
)
from kvcustody.audit.report.sampling.strata import allocate, draw_strata
from kvcustody.migrations.upgrade import upgrade


class Kept:
    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine, self.folder = engine, folder / "export"
        write_export(self.folder, LedgerSource(engine), made_at_us=1)

    def body(self, **changes: Any) -> dict[str, Any]:
        with self.engine.connect() as connection:
            size = newest_checkpoint(connection)
            since, until = period(connection, size, None, None)
            bounds = {"since_us": since, "until_us": until} | changes
            asked = ReportParameters("gdpr", size, bounds.pop("since_us"), bounds.pop("until_us"))
            made: dict[str, Any] = json.loads(build_report(connection, asked._replace(**bounds)).to_bytes())
        return made


@pytest.fixture(scope="module")
def kept(world_class: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    folder = tmp_path_factory.mktemp("reperformed")
    engine = open_store(folder / "ledger.db")
    upgrade(engine)
    report_ledger.fill(engine, world_class, folder)
    yield Kept(engine, folder)
    engine.dispose()


@pytest.mark.parametrize("which", ["whole", "by a stated risk", "half of the period"])
def test_it_agrees_with_every_figure_of_a_report(kept: Kept, which: str) -> None:
    changes: dict[str, Any] = {"seed": "an auditor's own"}
    if which == "by a stated risk":
        changes |= {"risk_ppm": 50_000, "tolerable_ppm": 50_000, "expected": 1}
    if which == "half of the period":
        whole = kept.body()["asked"]
        changes["until_us"] = (whole["since_us"] + whole["until_us"]) // 2
    found = reperform.compare(kept.folder, kept.body(**changes))
    assert [line for same, line in found.lines if not same] == []
    assert len(found.lines) > 100


def test_it_agrees_with_no_figure_that_was_changed(kept: Kept) -> None:
    body = kept.body()
    ways: dict[str, Callable[[Any], None]] = {
        "decisions": lambda made: made["decided"]["counts"][0].update(requests=999_999),
        "coverage": lambda made: made["coverage"][0].update(covered=made["coverage"][0]["covered"] + 1),
        "digest": lambda made: made["population"].update(digest="0" * 64),
        "draw": lambda made: made["sample"][0].update(place=made["sample"][0]["place"] + 1),
        "read": lambda made: made["read_back"][0].update(blocks_read=7),
        "kinds": lambda made: made["activity"]["kinds"][0].update(leaves=1),
        "ages": lambda made: made["storage"][0].update(age_us_p99=1),
        "limits": lambda made: made["storage"][0].update(within_us_max=1),
        "causes": lambda made: made["storage"][0].update(by_eviction=999_999),
        "gaps": lambda made: made["losses"].update(gaps=41),
        "trend": lambda made: made["board"]["trend"][-1].update(covered=1),
        "on time": lambda made: made["board"].update(erasures_on_time=999),
        "lags": lambda made: made["timeliness"]["lags"][0].update(custodies=1),
    }
    for name, change in ways.items():
        made = json.loads(json.dumps(body))
        change(made)
        assert not reperform.compare(kept.folder, made).ok, name
    assert reperform.compare(kept.folder, body).ok, "control"


def test_the_program_runs_by_itself(kept: Kept, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps(kept.body()))
    program = Path(reperform.__file__)
    command = [sys.executable, "-S", str(program), str(kept.folder), str(tmp_path / "report.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.endswith("0 differ\n") and "not covered: tiers" in done.stdout


def test_sizes_are_those_of_the_tables_that_auditors_use() -> None:
    """AICPA's attribute tables at 5 % risk: (tolerable %, expected) to sizes within rounding of the binomial's."""
    for tolerable, expected, size in ((5, 0, 59), (10, 0, 29), (5, 1, 93), (3, 0, 99), (10, 1, 46)):
        assert attribute_sample_size(50_000, tolerable * 10_000, expected) == size
        assert chance_of_at_most(expected, size, tolerable * 10_000) * 10**6 <= 50_000
        assert chance_of_at_most(expected, size - 1, tolerable * 10_000) * 10**6 > 50_000
    assert upper_limit_ppm(0, 59, 50_000) in range(49_000, 50_001)
    assert upper_limit_ppm(1, 93, 50_000) in range(49_000, 50_001)


def test_every_stratum_is_drawn_from_and_duplicates_are_counted() -> None:
    chance = random.Random(3)
    for _ in range(200):
        members = [chance.randrange(1, 400) for _ in range(chance.randrange(1, 12))]
        size = chance.randrange(0, 500)
        shares = allocate(size, members)
        assert sum(shares) == min(size, sum(members))
        assert all(share <= of for share, of in zip(shares, members, strict=True))
        assert size < len(members) or min(shares) >= 1
        for draw, share, of in zip(draw_strata("seed", size, members), shares, members, strict=True):
            assert len(set(draw.places)) == len(draw.places) == share and draw.duplicates >= 0
            assert all(0 <= place < of for place in draw.places)
    [draw] = draw_strata("seed", 9, [10])
    assert draw.duplicates > 0, "of ten places nine are not found without a repetition"
