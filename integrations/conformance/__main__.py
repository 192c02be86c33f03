"""`python -m kvcustody.integrations.conformance --engine ENGINE [--json] [--case NAME]`; exits 1 on failure."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import cast

from kvcustody.errors import ConfigError
from kvcustody.extensions import ENGINES, names_extension
from kvcustody.extensions import load as load_extension
from kvcustody.files import READABLE, write_file
from kvcustody.integrations.conformance.cases import ALL, BY_NAME
from kvcustody.integrations.conformance.engine_protocol import EngineFactory
from kvcustody.integrations.conformance.kit import SEED, run
from kvcustody.integrations.conformance.mutants.runner import kill, unaccounted
from kvcustody.integrations.conformance.record import digest_of, load_subject, record, subject_of
from kvcustody.integrations.conformance.report import CaseVerdict


def load(name: str) -> EngineFactory:
    """The factory behind `module:factory`, or `plugin:NAME`. Raises `ConfigError` where it is not there."""
    if names_extension(name):
        return cast(EngineFactory, load_extension(ENGINES, name).factory)
    module, _, attribute = name.partition(":")
    try:
        return cast(EngineFactory, getattr(importlib.import_module(module), attribute))
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"engine `{name}` is no `module:factory` here: {error}", engine=name) from error


def _progress(verdict: CaseVerdict) -> None:
    reason = f": {verdict.reason}" if verdict.reason else ""
    print(
        f"{verdict.verdict:4} {verdict.case} ({verdict.seconds:.2f} s){reason}", file=sys.stderr, flush=True
    )


def _mutants(factory: EngineFactory, name: str, seed: int) -> int:
    """Kill a module's mutants; 0 where none survives and every fault of the catalogue is accounted for."""
    module = importlib.import_module(name)
    survivors = 0
    for mutant in module.MUTANTS:
        death = kill(factory, mutant, seed=seed)
        survivors += not death.killed
        print(
            f"{'killed' if death.killed else 'SURVIVED':8} {mutant.fault}: {death.case} {death.reason[:100]}",
            flush=True,
        )
    left = unaccounted(module.MUTANTS, getattr(module, "NOT_APPLICABLE", {}))
    print(
        f"{len(module.MUTANTS) - survivors} of {len(module.MUTANTS)} killed, not accounted for: {left or 'none'}"
    )
    return 1 if survivors or left else 0


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, print; 0 where every case passed or was skipped with a reason."""
    parser = argparse.ArgumentParser(prog="python -m kvcustody.integrations.conformance")
    parser.add_argument("--engine", required=True, metavar="MODULE:FACTORY|plugin:NAME")
    parser.add_argument(
        "--case", action="append", choices=sorted(BY_NAME), help="only this one; may be repeated"
    )
    parser.add_argument(
        "--mutants", metavar="MODULE", help="kill this module's MUTANTS (and NOT_APPLICABLE) instead"
    )
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--record",
        type=Path,
        help="write a passed run of all cases here, for `vllm_connectors_allowed`; needs --subject",
    )
    parser.add_argument("--subject", metavar="MODULE:CLASS", help="the class that the record vouches for")
    chosen = parser.parse_args(arguments)
    if chosen.mutants:
        return _mutants(load(chosen.engine), chosen.mutants, chosen.seed)
    if bool(chosen.record) != bool(chosen.subject):
        parser.error("--record and --subject belong together")
    subject = subject_of(load_subject(chosen.subject)) if chosen.subject else None
    cases = [BY_NAME[name] for name in chosen.case] if chosen.case else ALL
    report = run(load(chosen.engine), cases, _progress, seed=chosen.seed)
    print(report.to_json() if chosen.json else f"{report}\nseed {chosen.seed}")
    if subject is not None and report.passed:
        data = record(report, subject)
        write_file(chosen.record, data, mode=READABLE)
        print(f"{chosen.record}: {subject.name} {subject.version}, digest {digest_of(data)}", file=sys.stderr)
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
