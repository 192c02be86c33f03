"""The auditor's program under examples/ agrees with every figure of three reports, and with none that was changed."""

from __future__ import annotations

import ast
import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
import reperform
from sqlalchemy import Engine

from kvcustody.audit.evidence.coverage import summary
from kvcustody.audit.exports.export_writer import write_export
from kvcustody.audit.exports.ledger_source import LedgerSource
from kvcustody.audit.reports.build_report import build_report, newest_checkpoint, period
from kvcustody.audit.reports.parameters import ReportParameters
from kvcustody.audit.reports.sampling.attribute_size import (
    attribute_sample_size,
    chance_of_at_most,
    upper_limit_ppm,
)
from kvcustody.audit.reports.sampling.strata import allocate, draw_strata
from kvcustody.audit.reports.signing.read_report import report_types
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.migrations.upgrade import upgrade
from standins.audit.documents import signed_by_reports_key
from standins.audit.ledgers import report_ledger, tiered_ledger

Body = dict[str, Any]
PROGRAM = Path(reperform.__file__).parent


class Kept:
    """A ledger, its export, the log's key, and reports that its own key signed."""

    def __init__(self, engine: Engine, folder: Path, key: SigningKey, signs: SigningKey) -> None:
        self.engine, self.folder, self.vkey, self.signs = engine, folder / "export", str(key.verifier), signs
        write_export(self.folder, LedgerSource(engine), made_at_us=1)

    def body(self, **changes: Any) -> Body:
        with self.engine.connect() as connection:
            size = newest_checkpoint(connection)
            since, until = period(connection, size, None, None)
            bounds = {"since_us": since, "until_us": until} | changes
            asked = ReportParameters("gdpr", size, bounds.pop("since_us"), bounds.pop("until_us"))
            report = build_report(connection, asked._replace(**bounds))
            report = signed_by_reports_key(connection, report, self.signs)
        made: Body = json.loads(report.to_bytes())
        return made

    def compare(self, body: Body, folder: Path | None = None) -> reperform.Comparison:
        return reperform.compare(folder or self.folder, body, self.vkey)


@pytest.fixture(scope="module")
def kept(world_class: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    folder = tmp_path_factory.mktemp("reperformed")
    engine = open_store(folder / "ledger.db")
    upgrade(engine)
    key = report_ledger.fill(engine, world_class, folder)
    yield Kept(engine, folder, key, report_ledger.REPORT_KEY)
    engine.dispose()


@pytest.fixture(scope="module")
def tiered(world_class: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Kept, Body]]:
    """A ledger with tiers whose log's key was handed over, and a report that extends its first checkpoint."""
    folder = tmp_path_factory.mktemp("tiered")
    engine = open_store(folder / "ledger.db")
    upgrade(engine)
    sealed = tiered_ledger.fill(engine, world_class, folder)
    made = Kept(engine, folder, tiered_ledger.OLD, tiered_ledger.REPORT_KEY)
    yield made, made.body(seed="another", sample=60, extends=sealed.first)
    engine.dispose()


def three(kept: Kept, tiered: tuple[Kept, Body]) -> list[tuple[Kept, Body]]:
    """One of a whole ledger; one of half a period by a stated risk; one with tiers."""
    whole = kept.body(seed="an auditor's own")
    half = (whole["asked"]["since_us"] + whole["asked"]["until_us"]) // 2
    risk = kept.body(until_us=half, risk_ppm=50_000, tolerable_ppm=50_000, expected=1)
    return [(kept, whole), (kept, risk), tiered]


def test_it_agrees_with_every_figure_of_three_reports(kept: Kept, tiered: tuple[Kept, Body]) -> None:
    """Every field of the model is compared in one of them, or the program's own list names it with a reason."""
    compared = set()
    for ledger, body in three(kept, tiered):
        found = ledger.compare(body)
        assert [line for same, line in found.lines if not same] == []
        assert len(found.lines) > 1000
        compared |= {re.sub(r"\[\d+\]", "[]", line.split()[1]) for _, line in found.lines}
    assert body["boundary"]["history"] and body["boundary"]["monitored"] and body["tiers"]["rows"]
    every = {
        path for name, of in report_types().items() for path in fields(of, name) if not reperform.is_not_covered(path)
    }
    left = {path for path in every - compared if path.split("[]")[0] not in compared}
    assert left == set()
    assert {path for path in every - compared if path.split("[]")[0] in compared} == {
        f"recount.differences[].{name}" for name in ("tenant", "classification", "figure", "tables", "leaves")
    }, "parts that were empty everywhere: tables that say something else than leaves"


def fields(of: Any, path: str) -> Iterator[str]:
    """Every field of a model as a path in its JSON, `[]` for any item of a list."""
    if get_origin(of) in (Union, UnionType):
        for each in get_args(of):
            yield from fields(each, path) if each is not type(None) else ()
    elif get_origin(of) is tuple:
        yield from fields(get_args(of)[0], f"{path}[]")
    elif hasattr(of, "_fields"):
        for name, each in get_type_hints(of).items():
            yield from fields(each, f"{path}.{name}" if path else name)
    else:
        yield path


def test_it_agrees_with_a_digest_that_is_made_in_steps(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a step takes: ended and overdue custodies together, or one kind alone."""
    whole = kept.body(recount=False)
    assert whole["total"]["overdue"], "both kinds are there"
    for step in (1, 7, 10**9):
        monkeypatch.setattr(summary, "_AT_ONCE", step)
        assert kept.body(recount=False)["population"] == whole["population"]
    assert kept.compare(whole).ok


def test_a_part_that_nobody_made_again_differs(kept: Kept) -> None:
    body = kept.body()
    again = reperform.Again(reperform.Export(kept.folder), body, None)
    made = again.report()
    assert reperform.compare_with(made, [], body).ok, "control"
    for holder in (body, body["board"], body["coverage"][0], body["sampling"]["strata"][0]):
        holder["a_new_figure"] = 7
        assert not reperform.compare_with(made, [], body).ok
        del holder["a_new_figure"]


@pytest.mark.parametrize("which", ["whole", "tiers"])
def test_it_agrees_with_no_figure_that_was_changed(kept: Kept, tiered: tuple[Kept, Body], which: str) -> None:
    """Each number that is covered, one by one."""
    ledger, body = (kept, kept.body()) if which == "whole" else tiered
    key = reperform.parse_key(ledger.vkey)
    again = reperform.Again(reperform.Export(ledger.folder), json.loads(json.dumps(body)), key)
    report, proofs, survived, count = again.report(), again.proofs(), [], 0
    assert reperform.compare_with(report, proofs, body).ok, "control"
    for holder, name, path in numbers(body, ""):
        if not reperform.is_not_covered(path):
            value, count = holder[name], count + 1
            holder[name] = not value if isinstance(value, bool) else value + 1
            top = path.split(".")[0].split("[")[0]
            part, of = ({top: side[top]} for side in (report, body))
            survived += [path] if reperform.compare_with(part, [], of).ok else []
            holder[name] = value
    assert survived == [] and count > 800


def numbers(value: Any, path: str) -> Iterator[tuple[Any, Any, str]]:
    """Every number of a JSON: its holder, its name there, and its path."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in items:
        below = f"{path}[{name}]" if isinstance(name, int) else f"{path}.{name}" if path else name
        if isinstance(each, int):
            yield value, name, below
        yield from numbers(each, below)


def changed_leaf(lines: list[bytes]) -> list[bytes]:
    place = next(place for place, line in enumerate(lines) if b'"software":"test"' in line)
    return [*lines[:place], lines[place].replace(b'"test"', b'"best"'), *lines[place + 1 :]]


def without_leaf(lines: list[bytes]) -> list[bytes]:
    return [line for place, line in enumerate(lines) if place != len(lines) // 2]


def swapped(lines: list[bytes]) -> list[bytes]:
    return [lines[1], lines[0], *lines[2:]]


@pytest.mark.parametrize(("change", "log"), [(changed_leaf, "system"), (without_leaf, "tenant"), (swapped, "tenant")])
def test_leaves_that_are_not_those_that_were_signed(
    kept: Kept, tmp_path: Path, change: Callable[[list[bytes]], list[bytes]], log: str
) -> None:
    """A leaf that was changed, dropped or moved: the log's tree is another, whatever the figures say."""
    folder = tmp_path / "export"
    shutil.copytree(kept.folder, folder)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    of = next(each for each in manifest["logs"] if each["name"].startswith(log))
    path = folder / of["files"][0]["path"]
    path.write_bytes(b"".join(line + b"\n" for line in change(path.read_bytes().splitlines())))
    found = kept.compare(kept.body(), folder)
    wrong = [line for same, line in found.lines if not same]
    assert any(f"the leaves of `{of['name']}` do not give the head" in line for line in wrong)
    assert any(line.startswith("DIFFERS  boundary.logs") for line in wrong)


def test_a_root_log_or_a_checkpoint_that_nobody_signed(kept: Kept, tmp_path: Path) -> None:
    """Forged as a whole: leaves and root log agree, and the key that the auditor has did not sign it."""
    folder = tmp_path / "export"
    shutil.copytree(kept.folder, folder)
    lines = (folder / "root.ndjson").read_bytes().splitlines()
    (folder / "root.ndjson").write_bytes(b"".join(line + b"\n" for line in lines[:-1]))
    wrong = [line for same, line in kept.compare(kept.body(), folder).lines if not same]
    assert any("the root log does not have the root" in line for line in wrong)
    stranger = SigningKey.generate(report_ledger.ORIGIN)
    found = reperform.compare(kept.folder, kept.body(), str(stranger.verifier))
    wrong = [line for same, line in found.lines if not same]
    assert any("checkpoint: signature" in line for line in wrong)
    assert any(".proof" in line for line in wrong), "nor does any leaf's proof hold"


def test_a_report_that_another_signed_or_whose_proofs_are_of_other_leaves(kept: Kept) -> None:
    forged = kept.body()
    forged["limitations"] = ["None."]  # words, which only the signature covers
    assert not kept.compare(forged).ok
    moved = kept.body()
    leaves = next(item["leaves"] for item in moved["sample"] if len(item["leaves"]) > 1)
    leaves[0]["proof"], leaves[1]["proof"] = leaves[1]["proof"], leaves[0]["proof"]
    wrong = [line for same, line in kept.compare(moved).lines if not same]
    assert sum(".proof" in line for line in wrong) == 2
    fewer = kept.body()
    fewer["sample"][0]["leaves"].pop()
    assert not kept.compare(fewer).ok, "a leaf that the verdict needs is not shown"


def test_the_program_runs_by_itself(kept: Kept, tiered: tuple[Kept, Body], tmp_path: Path) -> None:
    ledger, body = tiered
    (tmp_path / "report.json").write_text(json.dumps(body))
    shutil.copytree(PROGRAM, tmp_path / "alone", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-S", str(tmp_path / "alone" / "reperform.py"), str(ledger.folder)]
    command.append(str(tmp_path / "report.json"))
    for options, said in (([], "give the log's key"), (["--key", ledger.vkey], "when it was signed")):
        done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
        assert done.returncode == 0 and done.stdout.endswith("0 differ\n"), done.stdout[-2000:] + done.stderr
        assert said in done.stdout
    body = json.loads(json.dumps(body))
    body["tiers"]["rows"][0]["covered"] -= 1
    (tmp_path / "report.json").write_text(json.dumps(body))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "DIFFERS  tiers.rows[0].covered" in done.stdout, "control"


def test_it_shares_nothing_with_the_product() -> None:
    own = {path.stem for path in PROGRAM.glob("*.py")}
    for path in PROGRAM.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] in own | sys.stdlib_module_names, (path.name, name)


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
