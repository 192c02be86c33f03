"""How much one request may ever have: what no waiting can change."""

from __future__ import annotations

from kvcustody.allocator.pool.accounting import Account
from kvcustody.governance.admission_outcome import AdmissionRefused

TOO_BIG = "prompt and new tokens need"


def most_blocks(account: Account) -> int:
    """The most blocks that one request of this account could ever have."""
    return min(account.cap_blocks, account.partition.size)


def too_big(request_id: object, needed: int, account: Account) -> AdmissionRefused:
    """The refusal of a request that could not even run alone."""
    return AdmissionRefused(
        request_id,
        f"{TOO_BIG} `{needed}` blocks, the tenant may have `{most_blocks(account)}`; ask for fewer tokens",
    )
