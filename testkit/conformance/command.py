"""`kvcustody conformance`: runs the kit over an engine adapter and its mutants, and records a passed run."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Annotated, cast

import typer

from kvcustody.errors import ConfigError
from kvcustody.extensions import ENGINES, names_extension
from kvcustody.extensions import load as load_extension
from kvcustody.files import READABLE, write_file
from kvcustody.integrations.vllm.conformance_record import digest_of, load_subject, subject_of
from kvcustody.testkit.conformance.cases import ALL, BY_NAME
from kvcustody.testkit.conformance.engine_protocol import EngineFactory
from kvcustody.testkit.conformance.kit import SEED, run
from kvcustody.testkit.conformance.mutants.runner import kill, unaccounted
from kvcustody.testkit.conformance.report import CaseVerdict, record

EPILOG = """
Examples:

    kvcustody conformance --engine your.module:factory

    kvcustody conformance --engine plugin:your-engine --case scope/look-up --json

    kvcustody conformance --engine your.module:factory --subject your.connector:Connector --record connector.json

Exit code 0: no case failed, or no mutant survived. 1: one did.
"""


def conformance(
    *,
    engine: Annotated[str, typer.Option(metavar="MODULE:FACTORY|plugin:NAME", help="What makes an engine of a setup.")],
    case: Annotated[list[str] | None, typer.Option(help="Only this one; may be repeated.")] = None,
    mutants: Annotated[
        str, typer.Option(metavar="MODULE", help="Kill this module's MUTANTS (and NOT_APPLICABLE) instead.")
    ] = "",
    seed: Annotated[int, typer.Option(help="Chooses the prompts; a failure names it.")] = SEED,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    record_path: Annotated[
        Path | None,
        typer.Option(
            "--record",
            help="Write a passed run of all cases here, for `vllm_connectors_allowed`; needs --subject.",
        ),
    ] = None,
    subject: Annotated[str, typer.Option(metavar="MODULE:CLASS", help="The class that the record vouches for.")] = "",
) -> None:
    """Run the conformance kit over an engine adapter: what every engine, ours or a third party's, must pass."""
    if bool(record_path) != bool(subject):
        raise ConfigError("--record and --subject belong together")
    unknown = sorted(set(case or ()) - set(BY_NAME))
    if unknown:
        raise ConfigError(f"there is no case `{unknown[0]}`; `--json` lists them", case=unknown[0])
    if mutants:
        raise typer.Exit(_killed(_factory(engine), mutants, seed))
    vouched = subject_of(load_subject(subject)) if subject else None
    cases = [BY_NAME[name] for name in case] if case else ALL
    report = run(_factory(engine), cases, _progress, seed=seed)
    print(report.to_json() if as_json else f"{report}\nseed {seed}")
    if vouched is not None and record_path is not None and report.passed:
        data = record(report, vouched)
        write_file(record_path, data, mode=READABLE)
        print(f"{record_path}: {vouched.name} {vouched.version}, digest {digest_of(data)}", file=sys.stderr)
    raise typer.Exit(0 if report.passed else 1)


def _factory(name: str) -> EngineFactory:
    """Return the factory at `module:factory`, or `plugin:NAME`.

    Raises:
        ConfigError: there is none.
    """
    if names_extension(name):
        return cast(EngineFactory, load_extension(ENGINES, name).factory)
    module, _, attribute = name.partition(":")
    try:
        return cast(EngineFactory, getattr(importlib.import_module(module), attribute))
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"engine `{name}` is no `module:factory` here: {error}", engine=name) from error


def _progress(verdict: CaseVerdict) -> None:
    reason = f": {verdict.reason}" if verdict.reason else ""
    print(f"{verdict.verdict:4} {verdict.case} ({verdict.seconds:.2f} s){reason}", file=sys.stderr, flush=True)


def _killed(factory: EngineFactory, name: str, seed: int) -> int:
    """Run a module's mutants; return 0 where none survives and every fault in the catalogue is accounted for."""
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
    print(f"{len(module.MUTANTS) - survivors} of {len(module.MUTANTS)} killed, not accounted for: {left or 'none'}")
    return 1 if survivors or left else 0
