"""Who gets what of a sized pool: a policy's tenants by their quotas, and how many tenants of one profile fit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from kvcustody.errors import ConfigError
from kvcustody.files import READABLE, write_file
from kvcustody.lab.replay.charts import histogram
from kvcustody.lab.sizing.blocks_that_fit import SizingReport
from kvcustody.plurals import several
from kvcustody.policies.document.model import Policy, TenantPolicy

_STEPS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4)  # of the profile's context, in the plot
_STYLE = (
    "<style>text{font:11px sans-serif;fill:#333}.end{text-anchor:end}.middle{text-anchor:middle}"
    ".s1{fill:#3b6ea5}.axis{stroke:#999}</style>"
)


class TenantProfile(NamedTuple):
    """What a tenant keeps at once: so many sessions of so many tokens."""

    sessions: int
    tokens: int

    @classmethod
    def read(cls, text: str) -> TenantProfile:
        """`SESSIONSxTOKENS`, as 8x4096; raises `ConfigError`."""
        found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
        if found is None:
            raise ConfigError(f"tenant profile `{text}`: write SESSIONSxTOKENS, as 8x4096", profile=text)
        return cls(int(found[1]), int(found[2]))

    def bytes(self, report: SizingReport) -> int:
        """Bytes of K/V of one such tenant, in whole blocks."""
        size = report.block_tokens
        session = sum(
            group.blocks_for(self.tokens, size) * group.bytes_per_block(size) for group in report.layout.groups
        )
        return self.sessions * session

    def fit(self, report: SizingReport) -> int:
        """How many such tenants the K/V memory holds at once."""
        return report.kv_bytes // self.bytes(report)


def shares(report: SizingReport, policy: Policy) -> list[dict[str, Any]]:
    """Blocks and tokens by tenant: what is guaranteed to it, and the most that it may have, as the pool rounds."""
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
    """How many tenants of `profile` fit, and how that changes with the length of their sessions."""
    steps = [TenantProfile(profile.sessions, max(1, int(profile.tokens * step))) for step in _STEPS]
    return {
        "sessions": profile.sessions,
        "tokens": profile.tokens,
        "bytes": profile.bytes(report),
        "fit": profile.fit(report),
        "by_tokens": [{"tokens": one.tokens, "fit": one.fit(report)} for one in steps],
    }


def plot(path: Path, model: str, found: dict[str, Any]) -> None:
    """Write the tenants that fit, by tokens a session, as an SVG file. Raises `ConfigError` where it cannot."""
    rows = found["by_tokens"]
    title = f"{model}: tenants of {several(found['sessions'], 'session')} that fit"
    counts, edges = [row["fit"] for row in rows], [f"{row['tokens']:,}: {row['fit']:,}" for row in rows]
    drawn = str(histogram(title, counts, edges, "tokens a session: tenants"))
    start = drawn.index("<svg")
    svg = drawn[start : drawn.index("</svg>") + len("</svg>")].replace("<title>", f"{_STYLE}<title>", 1)
    try:
        write_file(path, svg.encode() + b"\n", mode=READABLE)
    except OSError as error:
        raise ConfigError(f"cannot write plot `{path}`: {error.strerror or error}", path=str(path)) from None
