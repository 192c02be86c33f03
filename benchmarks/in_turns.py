"""Whether this tree is slower than a commit: both run the same benchmarks, in turns, and their ratios are compared.

    python benchmarks/in_turns.py main~1                          # all that needs no engine: 15 minutes
    python benchmarks/in_turns.py f6818e1f admission --pairs 20   # one benchmark, with narrower intervals
    python benchmarks/in_turns.py HEAD --within 3                 # exit 1 unless each figure is at most 3 % worse
    python benchmarks/in_turns.py HEAD                            # in an unchanged tree: this machine's noise

1. A pair is two fresh processes, one of the commit and one of this tree. They run in turns of a fiftieth of a second,
   never both at once, so that what else the machine does falls on both. Each begins every other pair. A first pair,
   which compiles the bytecode, does not count.
2. A figure is CPU time: what the fastest tenth of a run's requests take at most, for other processes disturb it least.
   Where a script gives no more, it is the median.
3. A ratio is this tree's figure over the commit's, the median of the pairs: below 1 this tree is faster. Its 95 %
   interval is exact (a sign test's), and two disturbed pairs of 12 hardly move it. Where it is too wide for an answer,
   take more pairs. One interval of twenty misses the truth by chance: repeat a surprise before you believe it.
4. Both sides run from copies in a temporary folder, with the same interpreter and the same packages. You may edit
   this tree meanwhile. Its copy holds what is uncommitted, but nothing that git ignores.
5. This tree's scripts measure both sides, so that a changed benchmark is no difference; modules that moved since are
   found under the names that the commit has (`harness/earlier_names`). `--own-scripts` lets each side use its own:
   choose it where this tree's scripts import what the commit does not have yet.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent / "harness"))

from bench import Bench, table, turned
from spread import PAIRS_MIN, exact_paired

ROOT = Path(__file__).resolve().parents[1]
COMMIT, TREE = "commit", "tree"  # the sides
FOLDERS = "base", "this"  # of one length: a longer path is a larger environment
PAIRS = 12
SLICE_SECONDS = 0.02
Figures = dict[str, float]


class RunError(Exception):
    """The comparison cannot be made; the message says why, and what to do."""


class Benchmark(NamedTuple):
    """One script's run, of some seconds, and the figures to take of its result. Less is better in all of them."""

    measures: str
    script: str
    arguments: tuple[str, ...]
    figures: Callable[[Mapping[str, Any]], Figures]
    environment: str = ""  # the folder of another interpreter than this one


def _fastest(record: Mapping[str, Any], peer: str) -> float:
    return float(record["peers"][peer]["cpu"]["p10_us"])


def _admissions(result: Mapping[str, Any]) -> Figures:
    return {
        f"{each['tokens']} tokens, {each['hit_percent']} % hit, µs": _fastest(each, "governed")
        for each in result["requests"]
    }


def _decode(result: Mapping[str, Any]) -> Figures:
    return {"step of 256 sequences, µs": _fastest(result["decode"], "governed")}


def _decision(result: Mapping[str, Any]) -> Figures:
    return {f"{which}, ns": result["results"]["decision"][f"{which}_ns"] for which in ("own", "grant")}


def _ledger(result: Mapping[str, Any]) -> Figures:
    return {
        "an event queued, µs": result["enqueue_us"],
        "an event made a leaf, µs": result["leaf_in_a_batch_us"],
        "a leaf checked, µs": result["leaf_check_us"],
        "an event into SQLite, CPU µs": result["sqlite"]["writer_cpu_us"],
    }


def _ingest(result: Mapping[str, Any]) -> Figures:
    return {
        f"a leaf of {name.removeprefix('ingest_')}, CPU µs": found["service_cpu_us_a_leaf"]
        for name, found in result.items()
        if name.startswith("ingest_")
    }


def _explorer(result: Mapping[str, Any]) -> Figures:
    *_, largest = result["leaves"].values()
    return {f"{question}, CPU ms": took for question, took in largest["cpu_ms"].items()}


def _metrics(result: Mapping[str, Any]) -> Figures:
    of = {"a scrape": "scrape_0", "a scrape before folding": "unfolded", "the overview": "overview_0"}
    return {f"{what}, CPU ms": result[name]["cpu_ms"] for what, name in of.items()}


def _requests(result: Mapping[str, Any]) -> Figures:
    return {f"{what}, CPU µs": us for what, us in result["cpu_us"].items()}


def _report(result: Mapping[str, Any]) -> Figures:
    of = {"a report": "without_recount", "a report's verification": "verified_from_an_export"}
    return {f"{what}, CPU s": result[name]["cpu_s"] for what, name in of.items()}


def _startup(result: Mapping[str, Any]) -> Figures:
    return {
        f"{command}, CPU s": seconds for command, seconds in result["cpu_seconds"].items() if command != "python alone"
    }


def _against_vllm(result: Mapping[str, Any]) -> Figures:
    return {
        f"{each['tokens']} tokens, {each['hit_percent']} % hit, ÷ vLLM": _fastest(each, "governed")
        / _fastest(each, "vllm")
        for each in result["requests"]
    }


def _engine(result: Mapping[str, Any]) -> Figures:
    return {
        f"{work}, {what}, ÷ vLLM": result[work][ratio]["value"]
        for work in ("churny", "decode")
        for what, ratio in (("on the way", "ratio"), ("with waiting", "with_waiting"))
    }


_POINTS = ",".join(f"{tokens}/{hit}/evicting" for tokens in (1024, 8192, 32768) for hit in (0, 90))
_VLLM = ".venv-vllm"
BENCHMARKS = {
    "admission": Benchmark(
        "a governed request of 1K, 8K and 32K tokens, cold and warm, in a full pool",
        *("compare.py", ("--peers", "governed", "--rounds", "1", "--only", _POINTS), _admissions),
    ),
    "decode": Benchmark(
        "one token more for each of 256 running sequences",
        *("compare.py", ("--peers", "governed", "--rounds", "1", "--only", "decode"), _decode),
    ),
    "decision": Benchmark(
        "one decision of the policy, on an own block and through a grant",
        *("scale.py", ("--only", "decision"), _decision),
    ),
    "ledger": Benchmark(
        "events through the writer into SQLite, and the parts of that way",
        *("ledger.py", ("--rounds", "1", "--residencies", "2500"), _ledger),
    ),
    "ingest": Benchmark(
        "leaves of workers, over HTTP, into the service's ledger",
        # In a run of half a second, whether the figures' pass falls into it decides: this takes six seconds.
        *("service.py", ("--ingest", "--runs", "1", "--workers", "4", "--batches", "40"), _ingest),
    ),
    "explorer": Benchmark(
        "the explorer's first page, facets and histogram",
        *("evidence/explorer.py", ("--leaves", "20000"), _explorer),
    ),
    "metrics": Benchmark(
        "what a scrape and the overview read of the ledger",
        *("evidence/figures_cost.py", ("--events", "20000", "--slow", "1"), _metrics),
    ),
    "requests": Benchmark(
        "one request to the service, without a socket",
        *("fleet/request_cost.py", ("--events", "5000"), _requests),
    ),
    "report": Benchmark(
        "a report of a period in every format, and its verification",
        *("evidence/report_time.py", ("--events", "20000"), _report),
    ),
    "startup": Benchmark(
        "a command before it does anything",
        *("startup.py", ("--rounds", "1"), _startup),
    ),
    "vllm-admission": Benchmark(
        "a governed request over one of vLLM's own block manager",
        *("compare.py", ("--peers", "vllm,governed", "--rounds", "1", "--only", _POINTS), _against_vllm),
        environment=_VLLM,
    ),
    "vllm-engine": Benchmark(
        "a governed vLLM engine's scheduling over a plain one's",
        *("engines/vllm_cost.py", ("--pairs", "0", "--units", "60"), _engine),
        environment=_VLLM,
    ),
}
WITHOUT_ENGINE = [name for name, benchmark in BENCHMARKS.items() if not benchmark.environment]


# -- the two sides ----------------------------------------------------------------------------------------------


def git(*words: str) -> bytes:
    """What git answers in this repository; raises `RunError` with its complaint."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        complaint = done.stderr.decode().strip()
        raise RunError(f"git {words[0]} fails: {complaint}")
    return done.stdout


def resolve(commit: str) -> str:
    """The full id of a commit; raises `RunError` for one that this repository does not have."""
    try:
        return git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}^{{commit}}").decode().strip()
    except RunError as error:
        raise RunError(f"no commit `{commit}` in this repository: name a commit, a branch or a tag") from error


def unpack(commit: str, folder: Path) -> None:
    """The files of a commit."""
    with tarfile.open(fileobj=io.BytesIO(git("archive", "--format=tar", commit))) as archive:
        archive.extraction_filter = getattr(tarfile, "tar_filter", None)  # 3.11.4 and newer have one
        archive.extractall(folder)


def snapshot(folder: Path) -> None:
    """The files of this tree as they are now, without those that git ignores."""
    for name in filter(None, git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split(b"\0")):
        source, copy = ROOT / os.fsdecode(name), folder / os.fsdecode(name)
        if source.is_symlink() or source.is_file():  # one that was deleted may still be in the index
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy, follow_symlinks=False)


def interpreter(environment: str) -> Path:
    """The interpreter of a benchmark; raises `RunError` where its environment does not exist."""
    python = Path(sys.executable) if not environment else ROOT / environment / "bin" / "python"
    if not python.exists():
        raise RunError(f"there is no `{environment}`: make it with benchmarks/vllm_env.sh (3.5 GB)")
    return python


class Side(NamedTuple):
    """One of the two: its folder, and its name in messages."""

    folder: Path
    name: str

    def start(self, words: Sequence[str | Path], seed: int) -> subprocess.Popen[bytes]:
        """Start a process, in a group of its own, whose `kvcustody` is this side's, whatever is installed."""
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("KVCUSTODY_", "PYTHON"))
        }
        places = map(str, (self.folder / "src", self.folder / "benchmarks/harness/earlier_names"))
        environment |= {"PYTHONPATH": os.pathsep.join(places), "PYTHONHASHSEED": str(seed)}
        with self._output().open("wb") as output:
            return subprocess.Popen(
                [*map(str, words)],
                cwd=self.folder,
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def verify(self, python: Path) -> None:
        """Raise `RunError` unless that interpreter takes `kvcustody` from this side's folder."""
        self.start([python, "-c", "import kvcustody; print(kvcustody.__file__)"], 0).wait()
        place = self.last_line()
        if not Path(place).is_relative_to(self.folder):
            raise RunError(f"{python} does not run {self.name}: {place}")

    def begin(self, name: str, seed: int) -> subprocess.Popen[bytes]:
        """Start a benchmark."""
        self._result().unlink(missing_ok=True)
        benchmark = BENCHMARKS[name]
        script = self.folder / "benchmarks" / benchmark.script
        words = [interpreter(benchmark.environment), script, *benchmark.arguments, "--json", self._result()]
        return self.start(words, seed)

    def figures(self, name: str, status: int) -> Figures:
        """Read what a benchmark found that ended with `status`; raises `RunError` where it failed."""
        if status or not self._result().exists():
            raise RunError(
                f"`{name}` fails on {self.name}: {self.last_line()}\n"
                "This tree's scripts measure both sides; --own-scripts lets each side use its own."
            )
        try:
            return BENCHMARKS[name].figures(json.loads(self._result().read_text(encoding="utf-8")))
        except (KeyError, TypeError) as error:
            raise RunError(f"the result of `{name}` on {self.name} has another form: {error!r} fails") from error

    def last_line(self) -> str:
        """What its process said last."""
        text = self._output().read_text(encoding="utf-8", errors="replace")
        return (text.strip().splitlines() or ["it says nothing"])[-1]

    def _result(self) -> Path:
        return self.folder.with_suffix(".json")

    def _output(self) -> Path:
        return self.folder.with_suffix(".out")


# -- turns ------------------------------------------------------------------------------------------------------

Pair = Callable[[str, int, list[str]], Mapping[str, Figures]]  # of a benchmark, a number, and the order of the sides
Turns = dict[str, dict[str, dict[str, list[float]]]]  # by benchmark, figure and side


def run_in_slices(processes: Sequence[subprocess.Popen[bytes]], rest: Callable[[float], None] = time.sleep) -> None:
    """Let process groups run in turns until all have ended. No two run at once, and none is left behind.

    A machine whose speed changes from second to second is as fast for one as for the other.
    """
    running = list(processes)
    try:
        for process in running[1:]:
            _signal(process, signal.SIGSTOP)
        while running:
            for process in list(running):
                _signal(process, signal.SIGCONT)
                rest(SLICE_SECONDS)
                if process.poll() is not None:
                    running.remove(process)
                elif len(running) > 1:
                    _signal(process, signal.SIGSTOP)
    finally:
        for process in running:
            _signal(process, signal.SIGKILL)
            process.wait()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def take_turns(names: Sequence[str], run_pair: Pair, pairs: int, show: Callable[[str], None]) -> Turns:
    """Run a pair of every benchmark, `pairs` times, each side first in turn; the first time does not count."""
    taken: Turns = {name: {} for name in names}
    begun = time.monotonic()
    for pair in range(pairs + 1):
        for name in names:
            show(f"pair {pair} of {pairs}: {name}{_left(begun, pair, pairs)}")
            for side, figures in run_pair(name, pair, turned([COMMIT, TREE], pair)).items():
                for figure, value in figures.items():
                    if pair:
                        taken[name].setdefault(figure, {COMMIT: [], TREE: []})[side].append(value)
    return taken


def _left(begun: float, pair: int, pairs: int) -> str:
    if not pair:
        return " (does not count)"
    seconds = (time.monotonic() - begun) / pair * (pairs + 1 - pair)
    return f", about {seconds / 60:.0f} min left" if seconds >= 90 else f", about {seconds:.0f} s left"


class Line(NamedTuple):
    """One figure of a benchmark on both sides, and the ratio with its interval."""

    benchmark: str
    figure: str
    commit: float
    tree: float
    ratio: float
    low: float
    high: float

    def verdict(self, percent: float) -> str:
        """Whether this tree is at most so much worse, as far as the pairs show."""
        bound = 1 + percent / 100
        return "yes" if self.high <= bound else "no" if self.low > bound else "not shown: more pairs"


def compared(taken: Turns) -> Iterator[Line]:
    """A line for each figure."""
    for name, figures in taken.items():
        for figure, values in figures.items():
            commit, tree = values[COMMIT], values[TREE]
            yield Line(name, figure, median(commit), median(tree), *exact_paired(tree, commit))


def markdown(lines: Sequence[Line], commit: str, within: float | None) -> str:
    """The table that is printed."""
    header = ["benchmark", "figure", commit, "this tree", "ratio [95 %]"]
    rows = []
    for line in lines:
        row = [line.benchmark, line.figure, f"{line.commit:,.3g}", f"{line.tree:,.3g}"]
        rows.append([*row, f"{line.ratio:.3f} [{line.low:.3f}, {line.high:.3f}]"])
        if within is not None:
            rows[-1].append(line.verdict(within))
    return table([*header, *([f"at most {within:g} % worse"] if within is not None else [])], rows)


def compare(commit: str, names: Sequence[str], pairs: int, *, own_scripts: bool, show: Callable[[str], None]) -> Turns:
    """Copy both sides into a temporary folder, and let them take turns."""
    with tempfile.TemporaryDirectory(prefix="kvcustody-turns-") as temporary:
        folder = Path(temporary).resolve()
        base, tree = Side(folder / FOLDERS[0], commit[:12]), Side(folder / FOLDERS[1], "this tree")
        unpack(commit, base.folder)
        snapshot(tree.folder)
        if not own_scripts:
            shutil.rmtree(base.folder / "benchmarks")
            shutil.copytree(tree.folder / "benchmarks", base.folder / "benchmarks")
        for python in {interpreter(BENCHMARKS[name].environment) for name in names}:
            for side in (base, tree):
                side.verify(python)

        sides = {COMMIT: base, TREE: tree}

        def run_pair(name: str, pair: int, order: list[str]) -> dict[str, Figures]:
            processes = {side: sides[side].begin(name, pair) for side in order}
            run_in_slices(list(processes.values()))
            return {side: sides[side].figures(name, process.returncode) for side, process in processes.items()}

        return take_turns(names, run_pair, pairs, show)


def main() -> int:
    """Compare, print the table, and write the result file where asked."""
    listed = "\n".join(f"  {name:16}{benchmark.measures}" for name, benchmark in BENCHMARKS.items())
    bench = Bench(f"{__doc__}\nbenchmarks (those of vLLM need {_VLLM}, which benchmarks/vllm_env.sh makes):\n{listed}")
    bench.add("commit", metavar="COMMIT", help="what this tree is compared with")
    bench.add("benchmarks", metavar="benchmark", nargs="*", help="which (default: all that need no engine)")
    bench.add(
        "--pairs",
        type=int,
        default=PAIRS,
        help=f"turns of each side, {PAIRS_MIN} or more (default: %(default)s)",
    )
    bench.add("--within", type=float, metavar="PERCENT", help="exit 1 unless each figure is at most so much worse")
    bench.add("--own-scripts", action="store_true", help="measure each side by its own scripts")
    options = bench.parse()
    names = options.benchmarks or WITHOUT_ENGINE
    try:
        if unknown := [name for name in names if name not in BENCHMARKS]:
            raise RunError(f"no benchmark `{unknown[0]}`: there are {', '.join(BENCHMARKS)}")
        if options.pairs < PAIRS_MIN:
            raise RunError(f"--pairs {options.pairs}: an interval of 95 % needs {PAIRS_MIN} pairs or more")
        commit = resolve(options.commit)
        for name in names:
            interpreter(BENCHMARKS[name].environment)
        taken = compare(
            commit,
            names,
            options.pairs,
            own_scripts=options.own_scripts,
            show=lambda text: print(text, file=sys.stderr, flush=True),
        )
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    lines = list(compared(taken))
    print(markdown(lines, commit[:12], options.within))
    bench.keep(
        {
            "settings": {
                "compared_with": commit,
                "pairs": options.pairs,
                "own_scripts": options.own_scripts,
                "within_percent": options.within,
            },
            "figures": [line._asdict() for line in lines],
            "turns": taken,
        }
    )
    return int(options.within is not None and any(line.verdict(options.within) != "yes" for line in lines))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no stopped process is left behind
    sys.exit(main())
