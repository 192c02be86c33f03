"""Whose orders a process follows, and the key with which it signs its own, as its settings say.

The trust configuration of policies says it for orders too: keys with the role `orders` sign them, people's and the
control plane's. Without one every order counts, and whoever opens a ledger says so.
"""

from __future__ import annotations

from pathlib import Path

from kvcustody.audit.store.database.signed_orders import OwnKey, SignedOrders
from kvcustody.errors import ConfigError
from kvcustody.governance.release.signer import open_signer
from kvcustody.governance.release.trust import read_trust
from kvcustody.policies.bundle.trust import KeyRole


def read_signed_orders(trust_path: Path | None, ledger: str, key_path: Path | None) -> SignedOrders | None:
    """Whose orders count in the ledger of this name; None without a trust configuration.

    Raises `ConfigError` where the key at `key_path` may not sign orders, and as `read_trust` and `open_signer`.
    """
    if trust_path is None:
        return None
    trust = read_trust(trust_path)
    keys = {name: key for name, key in trust.keys.items() if KeyRole.ORDERS in key.roles}
    if key_path is None:
        return SignedOrders(trust.audience, ledger, keys)
    signer = open_signer(key_path)
    if signer.name not in keys:
        raise ConfigError(
            f"order_key_path `{key_path}`: trust file `{trust_path}` names no key `{signer.name}` with the role "
            f"`{KeyRole.ORDERS}`; add the role to that key there, or name another key",
            path=key_path,
        )
    return SignedOrders(trust.audience, ledger, keys, OwnKey(signer.name, signer.sign))
