"""Which signers' orders a process follows, and the key that signs its own, according to its settings.

The trust configuration of policies says it for orders too: keys with the role `orders` sign them, people's and the
control plane's. Without one every order counts, and whoever opens a ledger says so.
"""

from __future__ import annotations

from pathlib import Path

from kvcustody.audit.store.database.signed_orders import OrderKeys, OwnKey, SignedOrders
from kvcustody.errors import ConfigError
from kvcustody.governance.release.signer import open_signer
from kvcustody.governance.release.trust import TrustFile
from kvcustody.policies.bundle.trust import KeyRole, Trust


class _TrustedKeys:
    """The keys that may sign orders, as the trust configuration has them now."""

    def __init__(self, path: Path) -> None:
        self._file = TrustFile(path)
        self._trust = self._file.current()
        self._keys = _order_keys(self._trust)
        self.audience = self._trust.audience

    def __call__(self) -> OrderKeys:
        trust = self._file.current()
        if trust is not self._trust:
            self._trust, self._keys = trust, _order_keys(trust)
        return self._keys


def _order_keys(trust: Trust) -> OrderKeys:
    return {name: key for name, key in trust.keys.items() if KeyRole.ORDERS in key.roles}


def read_signed_orders(trust_path: Path | None, ledger: str, key_path: Path | None) -> SignedOrders | None:
    """Return the signers whose orders count in the ledger of this name; None without a trust configuration.

    Raises `ConfigError` where the key at `key_path` may not sign orders, and as `TrustFile` and `open_signer`.
    """
    if trust_path is None:
        return None
    keys = _TrustedKeys(trust_path)
    if key_path is None:
        return SignedOrders(keys.audience, ledger, keys)
    signer = open_signer(key_path)
    if signer.name not in keys():
        raise ConfigError(
            f"order_key_path `{key_path}`: trust file `{trust_path}` names no key `{signer.name}` with the role "
            f"`{KeyRole.ORDERS}`; add the role to that key there, or name another key",
            path=key_path,
        )
    return SignedOrders(keys.audience, ledger, keys, OwnKey(signer.name, signer.sign))
