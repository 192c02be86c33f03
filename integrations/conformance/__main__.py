"""`python -m kvcustody.integrations.conformance --engine module:factory [--json] [--case NAME]`; exits 1 on failure."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import cast

from kvcustody.errors import ConfigError
from kvcustody.integrations.conformance.cases import ALL, BY_NAME
from kvcustody.integrations.conformance.engine_under_test import EngineFactory
from kvcustody.integrations.conformance.kit import SEED, run
from kvcustody.integrations.conformance.report import Verdict


def load(name: str) -> EngineFactory:
    """The factory behind `module:factory`. Raises `ConfigError` where it is not there."""
    module, _, attribute = name.partition(":")
    try:
        return cast(EngineFactory, getattr(importlib.import_module(module), attribute))
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"engine `{name}` is no `module:factory` here: {error}", engine=name) from error


def _progress(verdict: Verdict) -> None:
    reason = f": {verdict.reason}" if verdict.reason else ""
    print(
        f"{verdict.verdict:4} {verdict.case} ({verdict.seconds:.2f} s){reason}", file=sys.stderr, flush=True
    )


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, print; 0 where every case passed or was skipped with a reason."""
    parser = argparse.ArgumentParser(prog="python -m kvcustody.integrations.conformance")
    parser.add_argument("--engine", required=True, metavar="MODULE:FACTORY")
    parser.add_argument(
        "--case", action="append", choices=sorted(BY_NAME), help="only this one; may be repeated"
    )
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    chosen = parser.parse_args(arguments)
    cases = [BY_NAME[name] for name in chosen.case] if chosen.case else ALL
    report = run(load(chosen.engine), cases, _progress, seed=chosen.seed)
    print(report.to_json() if chosen.json else f"{report}\nseed {chosen.seed}")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
