"""`benchmarks/in_turns.py`: turns, exact intervals, the right code on each side, and errors that say what to do.

No time is measured here: the figures are constants of the code that runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import in_turns
from in_turns import BENCHMARKS, COMMIT, TREE, Benchmark, Line, compare, compared, run_in_slices, take_turns
from spread import exact_paired

ROOT = Path(in_turns.__file__).parents[1]
for folder in ("benchmarks", "benchmarks/harness"):  # modules of these names are others to other tests
    sys.path.remove(str(ROOT / folder))


def test_an_interval_is_that_of_a_sign_test() -> None:
    """Which ratios bound it is in tables of the sign test: the first of 6, the third of 12, the sixth of 20."""
    for pairs, bound in ((6, 1), (12, 3), (20, 6)):
        ratios = np.arange(1.0, pairs + 1)
        found = exact_paired(np.flip(ratios) * 2, np.full(pairs, 2.0))
        assert found == ((pairs + 1) / 2, bound, pairs + 1 - bound)
    with pytest.raises(ValueError, match="5 pairs give no 95 % interval: 6 are the least"):
        exact_paired(ratios[:5], ratios[:5])


@pytest.mark.parametrize("true_ratio", [1.0, 1.03])
def test_an_interval_holds_the_true_ratio_as_often_as_it_says(true_ratio: float) -> None:
    chance = np.random.default_rng(46)
    hits = []
    for _ in range(600):
        machine = np.exp(chance.normal(0, 0.3, 12))  # slow and fast moments, which a pair shares
        noise = np.exp(chance.standard_t(3, (2, 12)) * 0.01)
        found = exact_paired(true_ratio * machine * noise[0], machine * noise[1])
        hits.append(found.low <= true_ratio <= found.high)
    assert 0.93 <= np.mean(hits) <= 0.99


def test_two_disturbed_pairs_of_twelve_do_not_hide_a_difference() -> None:
    chance = np.random.default_rng(1)
    commit, tree = np.exp(chance.normal(0, 0.003, (2, 12)))
    commit[[2, 7]] *= 3
    found = exact_paired(tree * 1.05, commit)
    assert 1.04 < found.value < 1.06 and found.low > 1.03


def test_sides_begin_in_turns_and_the_first_pair_does_not_count() -> None:
    order: list[tuple[int, str, list[str]]] = []

    def run_pair(name: str, pair: int, sides: list[str]) -> dict[str, dict[str, float]]:
        order.append((pair, name, sides))
        return {side: {"figure": float(pair)} for side in sides}

    shown: list[str] = []
    taken = take_turns(["a", "b"], run_pair, 2, shown.append)
    straight, reverse = [COMMIT, TREE], [TREE, COMMIT]
    assert order == [
        (pair, name, sides) for pair, sides in enumerate((straight, reverse, straight)) for name in ("a", "b")
    ]
    assert taken == {name: {"figure": {COMMIT: [1.0, 2.0], TREE: [1.0, 2.0]}} for name in ("a", "b")}
    assert shown[0] == "pair 0 of 2: a (does not count)" and len(shown) == len(order)
    assert shown[-1].startswith("pair 2 of 2: b, about ")


WAITING = "import pathlib, time\nwhile not pathlib.Path('end').exists(): time.sleep(0.01)"


def is_stopped(process: subprocess.Popen[bytes]) -> bool:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def processes(folder: Path) -> list[subprocess.Popen[bytes]]:
    return [subprocess.Popen([sys.executable, "-c", WAITING], cwd=folder, start_new_session=True) for _ in range(2)]


def test_no_two_processes_of_a_pair_run_at_once(tmp_path: Path) -> None:
    pair = processes(tmp_path)
    running: list[int] = []

    def rest(_: float) -> None:
        if all(process.poll() is None for process in pair) and len(running) < 6:
            for _ in range(500):  # a signal takes effect a moment after it was sent
                awake = [number for number, process in enumerate(pair) if not is_stopped(process)]
                if len(awake) == 1:
                    break
                time.sleep(0.01)
            running.extend(awake)
        else:
            (tmp_path / "end").touch()
            time.sleep(0.05)

    run_in_slices(pair, rest)
    assert running == [0, 1, 0, 1, 0, 1]
    assert [process.returncode for process in pair] == [0, 0]


def test_an_interrupted_pair_leaves_no_process_behind(tmp_path: Path) -> None:
    pair = processes(tmp_path)

    def rest(_: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_in_slices(pair, rest)
    assert [process.returncode for process in pair] == [-9, -9]


def test_a_verdict_is_that_of_the_interval() -> None:
    def verdict(low: float, high: float) -> str:
        return Line("admission", "µs", 1.0, 1.0, (low + high) / 2, low, high).verdict(3)

    assert verdict(0.99, 1.02) == "yes" and verdict(0.5, 0.6) == "yes", "faster is not worse"
    assert verdict(1.04, 1.06) == "no" and verdict(0.98, 1.05) == "not shown: more pairs"


SCRIPT = """
import json, sys
from pathlib import Path
import kvcustody
Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps({"cost": kvcustody.COST * SCALE}))
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose product costs 4, and 5 in what is not committed."""
    folder = tmp_path / "repository"
    (folder / "benchmarks").mkdir(parents=True)
    (folder / "src" / "kvcustody").mkdir(parents=True)
    product, script = folder / "src" / "kvcustody" / "__init__.py", folder / "benchmarks" / "cost.py"
    product.write_text("COST = 4.0\n")
    script.write_text(SCRIPT.replace("SCALE", "1"))
    for words in ("init --quiet", "add .", "-c user.name=a -c user.email=a@b commit --quiet -m first"):
        subprocess.run(["git", *words.split()], cwd=folder, check=True)
    product.write_text("COST = 5.0\n")
    script.write_text(SCRIPT.replace("SCALE", "10"))
    monkeypatch.setattr(in_turns, "ROOT", folder)
    monkeypatch.setitem(
        BENCHMARKS, "cost", Benchmark("a constant", "cost.py", (), lambda result: {"cost": result["cost"]})
    )
    return folder


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["in_turns.py", *words])
    return in_turns.main()


def test_each_side_runs_its_own_product_by_the_same_script(repository: Path) -> None:
    commit = in_turns.resolve("HEAD")
    (line,) = compared(compare(commit, ["cost"], 6, own_scripts=False, show=print))
    assert line == ("cost", "cost", 40.0, 50.0, 1.25, 1.25, 1.25)
    (own,) = compared(compare(commit, ["cost"], 6, own_scripts=True, show=print))
    assert own == ("cost", "cost", 4.0, 50.0, 12.5, 12.5, 12.5), "control: each by its own script"


def test_a_side_that_another_product_would_run_on_is_refused(repository: Path) -> None:
    (repository / "src" / "kvcustody" / "__init__.py").unlink()  # the installed one would be measured
    (repository / "src" / "kvcustody").rmdir()
    with pytest.raises(in_turns.RunError, match="does not run this tree"):
        compare(in_turns.resolve("HEAD"), ["cost"], 6, own_scripts=False, show=print)


@pytest.mark.system("a benchmark in turns prints or keeps another ratio")
def test_the_command_prints_and_keeps_what_it_found(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept.json"
    words = ("HEAD", "cost", "--pairs", "6", "--json", str(kept))
    assert run(monkeypatch, *words) == 0 and run(monkeypatch, *words, "--within", "30") == 0
    printed = capsys.readouterr()
    assert "| cost | cost | 40 | 50 | 1.250 [1.250, 1.250] | yes |" in printed.out
    assert "pair 6 of 6: cost, about " in printed.err
    found = json.loads(kept.read_text())
    assert found["settings"]["compared_with"] == in_turns.resolve("HEAD")
    assert found["turns"]["cost"]["cost"] == {COMMIT: [40.0] * 6, TREE: [50.0] * 6}
    assert run(monkeypatch, *words, "--within", "20") == 1, "25 % worse"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no-such-commit", "cost"], "no commit `no-such-commit` in this repository: name a commit"),
        (["--", "--help", "cost"], "no commit `--help` in this repository"),
        (["HEAD", "latency"], "no benchmark `latency`: there are admission, decode, "),
        (["HEAD", "cost", "--pairs", "5"], "--pairs 5: an interval of 95 % needs 6 pairs or more"),
        (["HEAD", "vllm-admission"], "there is no `.venv-vllm`: make it with benchmarks/vllm_env.sh"),
        (["HEAD", "failing"], "`failing` fails on "),
        (["HEAD", "other"], "the result of `other` on "),
    ],
)
def test_an_error_says_what_to_do(
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    (repository / "benchmarks" / "failing.py").write_text("raise SystemExit('no such module')")
    monkeypatch.setitem(BENCHMARKS, "failing", Benchmark("nothing", "failing.py", (), dict))
    monkeypatch.setitem(
        BENCHMARKS, "other", Benchmark("nothing", "cost.py", (), lambda result: {"price": result["price"]})
    )
    assert run(monkeypatch, *words) == 2
    complaint = capsys.readouterr().err
    assert f"error: {message}" in complaint
    assert ("no such module\nThis tree's scripts measure both sides" in complaint) == ("failing" in words)


def test_every_script_is_there_and_help_lists_every_benchmark(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "--help")
    told = capsys.readouterr().out
    for name, benchmark in BENCHMARKS.items():
        assert (ROOT / "benchmarks" / benchmark.script).exists() and f"  {name} " in told
