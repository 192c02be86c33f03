"""A paged engine whose policy declares a segment."""

from __future__ import annotations

from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.governance.decisions.segment_matcher import declare
from kvcustody.governance.identity.domain_spec import tenant_owner
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from standins.integrations.tiered_engine import TIER_POLICY, TieredEngine, prompt

SHARED = prompt(1, 69)  # of which the last eight may be tokenized otherwise: three units of 16 tokens and a part of one


COVERED = 61


POLICY = TIER_POLICY.replace("cap: 25%", "cap: 100%")  # of those that no rule names


class SegmentedEngine(TieredEngine):
    """Its policy has the segment `s` of alpha's, for some tenants."""

    def share(self, *tenants: str, tokens: list[int] = SHARED) -> None:
        """The segment is for these from now on; for nobody, it is withdrawn."""
        text = POLICY
        if tenants:
            segment = declare(
                self.port.keyring,
                tenant_owner("idp", "alpha"),
                tokens,
                model=self.model.digest,
                block_tokens=self.page_tokens,
            )
            text += (
                f"segments: [{{id: s, owner: alpha, tenants: [{', '.join(tenants)}], "
                f"digest: 'hmac:{segment.digest}', tokens: {segment.tokens}, "
                f"classification: low, expires: 2099-01-01}}]\n"
            )
        self.readers |= set(tenants)
        table = compile_policy(load_policy(text, name="s.yaml"), revision=self.port.table.revision + 1)
        self.port.activate(table, actor="tests")

    def copies_of_the_segment(self) -> int:
        """Copies in its own domain."""
        owners: list[DomainLabel] = [
            tier._index.owners[tier._index.rows.row(row).domain].label
            for tier in self.tiers
            for _, row in tier._index.rows.names()
        ]
        return sum(label is not None and label.grant_or_segment == "s" for label in owners)
