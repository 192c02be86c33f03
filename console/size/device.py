"""`kvcustody size`: what fits on a device, from a model's `config.json`."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from kvcustody.console.command import Json, make_table, print_json, stdout
from kvcustody.errors import ConfigError
from kvcustody.files import READABLE, write_file
from kvcustody.governance.service.operations.parameter_groups import ParameterGroup, grouped
from kvcustody.lab.replay.charts import histogram
from kvcustody.lab.replay.options import read_policy
from kvcustody.lab.sizing.blocks_that_fit import SizingReport, format_bytes, parse_bytes, size_pool
from kvcustody.lab.sizing.config_file import read_config
from kvcustody.lab.sizing.engine_blocks import EngineAllocation, engine_blocks
from kvcustody.plurals import several
from kvcustody.policies.document.model import Policy, TenantPolicy

EPILOG = """
Examples:

    kvcustody size config.json --gpu-memory 80GiB

    kvcustody size config.json --gpu-memory 80GiB --tensor-parallel 4 --kv-dtype fp8

    kvcustody size config.json --gpu-memory 24GiB --weights 15GiB --context 4096:3 --context 32768:1 --json

    kvcustody size config.json --gpu-memory 80GiB --policy policy.yaml --tenant-profile 8x4096 --plot tenants.svg
"""


@dataclass(frozen=True, kw_only=True)
class DeviceMemory(ParameterGroup):
    """The memory of one device, and its other uses."""

    gpu_memory: Annotated[str, typer.Option(help="Memory of one device: 80GiB, 80GB, 24576MiB.")]
    utilisation: Annotated[float, typer.Option(help="Share of it that may be used.")] = 0.9
    weights: Annotated[str | None, typer.Option(help="Size of the weights on one device; without it, an estimate.")] = (
        None
    )
    workspace: Annotated[str, typer.Option(help="Activations and graphs on one device.")] = "0"
    headroom: Annotated[str, typer.Option(help="Memory to leave free.")] = "0"


@dataclass(frozen=True, kw_only=True)
class CacheOptions(ParameterGroup):
    """The cache's layout, and the contexts that it serves."""

    block_tokens: Annotated[int, typer.Option(help="Tokens a block.")] = 16
    kv_dtype: Annotated[
        str | None, typer.Option(help="fp8, int8, nvfp4, bf16, fp16 or fp32; default: the model's.")
    ] = None
    tensor_parallel: Annotated[int, typer.Option(help="Devices that share every layer.")] = 1
    context: Annotated[
        list[str] | None,
        typer.Option(help="A context length to plan for, as TOKENS or TOKENS:WEIGHT; repeatable."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class TenantOptions(ParameterGroup):
    """The tenants' shares of the cache."""

    policy: Annotated[
        str | None,
        typer.Option(help="A library policy or a YAML file: blocks and tokens by tenant, from its quotas."),
    ] = None
    tenant_profile: Annotated[
        str | None,
        typer.Option(help="How many tenants fit that keep SESSIONSxTOKENS each, as 8x4096."),
    ] = None
    plot: Annotated[
        Path | None, typer.Option(help="With --tenant-profile: tenants by tokens a session, as an SVG file.")
    ] = None


@grouped
def size(
    *,
    config: Annotated[Path, typer.Argument(help="A Hugging Face config.json.", metavar="CONFIG")],
    memory: DeviceMemory,
    cache: CacheOptions,
    plan: TenantOptions,
    as_json: Json = False,
) -> None:
    """Size the KV cache of a model on a device: exact bytes per token, blocks, tokens and sequences.

    Nothing universal is assumed: layers, key/value heads, head dimensions, latent, sparse or sliding-window attention,
    recurrent states, cross-attention and the cache's dtype come from the config. A kind of layer that is not known is
    an error that names it. Figures are of one device.
    """
    if plan.plot is not None and plan.tenant_profile is None:
        raise ConfigError("`--plot` draws how many tenants fit: give --tenant-profile, as 8x4096")
    profile = TenantProfile.read(plan.tenant_profile) if plan.tenant_profile is not None else None
    report = size_pool(
        read_config(config),
        gpu_memory_bytes=parse_bytes(memory.gpu_memory),
        utilisation=memory.utilisation,
        weights_bytes=None if memory.weights is None else parse_bytes(memory.weights),
        workspace_bytes=parse_bytes(memory.workspace),
        headroom_bytes=parse_bytes(memory.headroom),
        block_tokens=cache.block_tokens,
        kv_dtype=cache.kv_dtype,
        tensor_parallel=cache.tensor_parallel,
        context_mix=[_context(item) for item in cache.context] if cache.context else None,
    )
    tenants = shares(report, read_policy(plan.policy)) if plan.policy is not None else None
    fit = fitting(report, profile) if profile is not None else None
    if plan.plot is not None and fit is not None:
        plot(plan.plot, report.layout.model_type, fit)
    if as_json:
        more = {"tenants": tenants, "tenant_profile": fit}
        print_json(as_document(report) | {name: value for name, value in more.items() if value is not None})
    else:
        _print(config, report)
        _print_tenants(report, tenants, fit)


def as_document(report: SizingReport) -> dict[str, Any]:
    """Return the report as JSON values."""
    document = asdict(report)
    document["layout"]["bytes_per_token"] = report.layout.bytes_per_token
    document["engine"] = _engine(report)._asdict()
    for group, row in zip(document["groups"], report.groups, strict=True):
        group["group"]["name"] = row.group.name
    return document


def _engine(report: SizingReport) -> EngineAllocation:
    return engine_blocks(report.layout, block_tokens=report.block_tokens, kv_bytes=report.kv_bytes)


def _context(text: str) -> tuple[int, float]:
    tokens, _, weight = text.partition(":")
    try:
        return int(tokens), float(weight or 1)
    except ValueError:
        raise ConfigError(f"context `{text}`: write TOKENS or TOKENS:WEIGHT", context=text) from None


def _print(path: Path, report: SizingReport) -> None:
    console = stdout()
    memory = make_table(
        f"{path}: {report.layout.model_type}, KV cache as {report.layout.dtype.value}",
        "memory of one device",
        "bytes",
        "",
    )
    rows = [
        ("device", report.gpu_memory_bytes),
        (f"usable at {report.utilisation:g}", report.usable_bytes),
        ("weights" + (" (estimated)" if report.weights_estimated else ""), -report.weights_bytes),
        ("workspace", -report.workspace_bytes),
        ("headroom", -report.headroom_bytes),
        ("KV cache", report.kv_bytes),
    ]
    for name, count in rows:
        memory.add_row(name, f"{count:,}", format_bytes(count))
    console.print(memory)
    groups = make_table(
        "layer groups", "group", "layers", "kv heads", "bytes a token", "bytes a block", "blocks", "bytes"
    )
    for row in report.groups:
        groups.add_row(
            row.group.name,
            str(row.group.layers),
            str(row.group.kv_heads),
            f"{row.bytes_per_token:,}",
            f"{row.bytes_per_block:,}",
            f"{row.blocks:,}",
            format_bytes(row.bytes),
        )
    console.print(groups)
    console.print(
        f"{report.blocks:,} blocks of {report.block_tokens} tokens hold {report.tokens:,} tokens "
        f"({report.sequences:,.1f} sequences of the planned contexts)"
    )
    console.print(
        f"{report.bytes_per_token:,} bytes a token here, {report.bytes_per_token_model:,} over all shards; "
        f"{format_bytes(report.metadata_bytes)} of host memory for metadata"
    )
    engine = _engine(report)
    console.print(
        f"vLLM makes {engine.blocks:,} blocks of {engine.block_tokens} tokens of it, "
        f"{format_bytes(engine.bytes_per_block)} each, with {engine.tables} block "
        f"{'table' if engine.tables == 1 else 'tables'} a sequence"
    )
    for note in report.notes:
        console.print(f"note: {note}", style="dim")


def _print_tenants(report: SizingReport, tenants: list[dict[str, Any]] | None, fit: dict[str, Any] | None) -> None:
    console = stdout()
    if tenants is not None:
        rows = make_table("by tenant", "tenant", "guaranteed blocks", "tokens", "blocks at most", "tokens at most")
        for row in tenants:
            name = row["tenant"] if row["tenants"] == 1 else f"{row['tenant']} (each of {row['tenants']})"
            columns = ("guaranteed_blocks", "guaranteed_tokens", "cap_blocks", "cap_tokens")
            rows.add_row(name, *(f"{row[column]:,}" for column in columns))
        console.print(rows)
    if fit is not None:
        console.print(
            f"{fit['fit']:,} tenants fit that keep {fit['sessions']} sessions of {fit['tokens']:,} tokens each: "
            f"{format_bytes(fit['bytes'])} a tenant of {format_bytes(report.kv_bytes)}"
        )


# Tenants' shares of a sized pool: a policy's tenants by their quotas, and how many tenants of one profile fit.

_STEPS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4)  # of the profile's context, in the plot
_STYLE = (
    "<style>text{font:11px sans-serif;fill:#333}.end{text-anchor:end}.middle{text-anchor:middle}"
    ".s1{fill:#3b6ea5}.axis{stroke:#999}</style>"
)


class TenantProfile(NamedTuple):
    """The sessions that one tenant keeps at once, and their tokens."""

    sessions: int
    tokens: int

    @classmethod
    def read(cls, text: str) -> TenantProfile:
        """Parse `SESSIONSxTOKENS`, such as 8x4096.

        Raises:
            ConfigError: the text has another form.
        """
        found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
        if found is None:
            raise ConfigError(f"tenant profile `{text}`: write SESSIONSxTOKENS, as 8x4096", profile=text)
        return cls(int(found[1]), int(found[2]))

    def bytes(self, report: SizingReport) -> int:
        """Return the K/V bytes of one such tenant, in whole blocks."""
        size = report.block_tokens
        session = sum(
            group.blocks_for(self.tokens, size) * group.bytes_per_block(size) for group in report.layout.groups
        )
        return self.sessions * session

    def fit(self, report: SizingReport) -> int:
        """Return how many such tenants the K/V memory holds at once."""
        return report.kv_bytes // self.bytes(report)


def shares(report: SizingReport, policy: Policy) -> list[dict[str, Any]]:
    """Return blocks and tokens by tenant: the guaranteed ones, and the maximum, rounded as the pool does."""
    listed = (*policy.tenants, *((policy.default,) if policy.default is not None else ()))
    return [_share(report, policy, tenant) for tenant in listed]


def _share(report: SizingReport, policy: Policy, tenant: TenantPolicy) -> dict[str, Any]:
    guaranteed = int(tenant.guaranteed * report.blocks)
    cap = guaranteed if policy.profile.isolating else int(tenant.cap * report.blocks)
    return {
        "tenant": tenant.id,
        "tenants": tenant.tenants_max or 1,
        "guaranteed_blocks": guaranteed,
        "guaranteed_tokens": guaranteed * report.tokens // report.blocks,
        "cap_blocks": cap,
        "cap_tokens": cap * report.tokens // report.blocks,
    }


def fitting(report: SizingReport, profile: TenantProfile) -> dict[str, Any]:
    """Return how many tenants of `profile` fit, and how that changes with their sessions' length."""
    steps = [TenantProfile(profile.sessions, max(1, int(profile.tokens * step))) for step in _STEPS]
    return {
        "sessions": profile.sessions,
        "tokens": profile.tokens,
        "bytes": profile.bytes(report),
        "fit": profile.fit(report),
        "by_tokens": [{"tokens": one.tokens, "fit": one.fit(report)} for one in steps],
    }


def plot(path: Path, model: str, document: dict[str, Any]) -> None:
    """Write the number of tenants that fit by tokens per session as an SVG file.

    Raises:
        ConfigError: it cannot be written.
    """
    rows = document["by_tokens"]
    title = f"{model}: tenants of {several(document['sessions'], 'session')} that fit"
    counts, edges = [row["fit"] for row in rows], [f"{row['tokens']:,}: {row['fit']:,}" for row in rows]
    drawn = str(histogram(title, counts, edges, "tokens a session: tenants"))
    start = drawn.index("<svg")
    svg = drawn[start : drawn.index("</svg>") + len("</svg>")].replace("<title>", f"{_STYLE}<title>", 1)
    try:
        write_file(path, svg.encode() + b"\n", mode=READABLE)
    except OSError as error:
        raise ConfigError(f"cannot write plot `{path}`: {error.strerror or error}", path=str(path)) from None
