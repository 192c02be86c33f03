"""The paged engine with tiers: what a page holds is bytes, as a function of whose it is and of every token before.

It says of nothing that comes back that it is right: `PagedEngine.start` compares it with what was computed.
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvcustody.clock import VirtualClock
from kvcustody.governance.keys.root_key_wrapping import open_wrapping
from kvcustody.governance.observability.prefill_cost import DeclaredRate
from kvcustody.governance.tiers.open_tiers import BlockShape, TierPlan, open_tiers
from kvcustody.governance.tiers.run_transfers import RunTransfers
from kvcustody.governance.tiers.tier import SealedTier
from kvcustody.governance.tiers.tier_rules import TierRules
from kvcustody.integrations.sglang.page_tree import Pages
from kvcustody.integrations.sglang.slot_tiers import SlotTiers, unit_pages
from kvcustody.testkit.conformance.policy import policy
from standins.integrations.paged_engine import Content, PagedEngine

PAGE_BYTES = 32
OBJECT_UNITS = 4  # 64 tokens
TIER_POLICY = policy().replace("offload: {low: never", "offload: {low: {tiers: [host, nvme], encrypt: required}")
TIER_POLICY = TIER_POLICY.replace("guaranteed: 25%, cap: 75%", "guaranteed: 0%, cap: 100%")  # a crowd takes all
assert "nvme" in TIER_POLICY and "25%, cap: 75%" not in TIER_POLICY


class TieredEngine(PagedEngine):
    """With `host`, `nvme` or both; `folder` keeps the keys and the files."""

    def __init__(
        self,
        folder: Path,
        tiers: str = "host",
        *,
        text: str = TIER_POLICY,
        pages: int = 260,
        page_tokens: int = 1,
        host_bytes: int = 1 << 20,
        tokens_a_second: float | None = 1.0,
        before: TieredEngine | None = None,
    ) -> None:
        """`before`: an engine of the same deployment that has ended; what it left may be found."""
        clock = VirtualClock() if before is None else before.clock
        super().__init__(text, clock, pages, page_tokens, None if before is None else before.port.keyring)
        self.bytes_per_page = PAGE_BYTES
        self._codes: dict[bytes, Content] = {} if before is None else before._codes
        plan = TierPlan(
            folder / "shred.keys",
            host_bytes if "host" in tiers else 0,
            folder / "tier" if "nvme" in tiers else None,
            1 << 20,
            object_blocks=OBJECT_UNITS,
            timeout_seconds=5.0,
        )
        port, unit = self.port, unit_pages(page_tokens)
        rules = TierRules(
            lambda: port.tables,
            port.authorize,
            lambda: port.restricted,
            lambda: port.custody.is_over(port.clock.now_us()),
        )
        shape = BlockShape(unit * PAGE_BYTES, 1, unit * page_tokens)
        self.stack = ExitStack()
        root = open_wrapping("generated", folder / "root.key")
        made = open_tiers(plan, shape, port.keyring, root, self.clock, self.stack, rules)
        cost: Any = port.measures.cost if tokens_a_second is None else DeclaredRate(tokens_a_second)
        self.transfers = RunTransfers(made, cost, self.clock, shape.block_tokens)
        self.custody.tiers = SlotTiers(self.transfers, port, self, page_tokens)

    @property
    def tiers(self) -> list[SealedTier]:
        return self.transfers.tiers

    def close(self) -> None:
        with self.stack:
            assert self.custody.tiers is not None
            self.custody.tiers.close()

    def crowd(self, seed: int = 0) -> None:
        """Others' prompts, until nothing of before is on the device."""
        for number in range(4):
            self.run("beta", "crowd", prompt(5000 + 10 * seed + number, self.pages * self.page_tokens // 3))

    # -- PageBytes ------------------------------------------------------------------------------------------------

    def _coded(self, content: Content) -> bytes:
        code = hashlib.blake2b(repr(content).encode(), digest_size=PAGE_BYTES).digest()
        self._codes[code] = content
        return code

    def read(self, pages: Pages, into: memoryview) -> None:
        assert len(into) == len(pages) * PAGE_BYTES
        for at, page in enumerate(pages.tolist()):
            into[at * PAGE_BYTES : (at + 1) * PAGE_BYTES] = self._coded(self.content[page])

    def write(self, pages: Pages, data: memoryview) -> None:
        assert len(data) == len(pages) * PAGE_BYTES
        for at, page in enumerate(pages.tolist()):
            assert page not in self.content, "a page that was not zero is filled"
            said = bytes(data[at * PAGE_BYTES : (at + 1) * PAGE_BYTES])
            self.content[page] = self._codes.get(said, ("nobody's", ()))


def prompt(seed: int, tokens: int) -> list[int]:
    """Token ids that no other seed shares."""
    return [1 + (seed * 7919 + at * (seed % 11 + 3) + at // 13) % 30_000 for at in range(tokens)]
