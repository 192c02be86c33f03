"""Signed orders, and whose signatures a process trusts.

    orders = SignedOrders("prod", "example.com/ledger", lambda: keys, own)
    authenticate(engine, orders)              # from here on, for every reader and every writer of this engine
    orders_of(connection).accepted(leaf, kind)      # what an order says; None: nobody acts on this leaf

1. A signature covers the whole leaf but itself, the deployment (`audience`) and the ledger's name. So no order moves to
   another ledger, and none gets another tenant, deadline or time.
2. The leaf counts, and no row beside it: whoever acts on an order takes its fields and its time from the signed leaf.
   So a copy of an older order is no newer than the order was, and none is of another kind than its leaf says.
3. An engine that nobody authenticated believes every order.
4. What is not believed is remembered, a bounded number, so that whoever reads can put it on record.
5. An order from before orders were signed counts where a signed `order-signed` leaf names its digest: as it stands,
   and from its own time. So nothing that was superseded, ended or answered comes back.
6. A process without a key writes no order: whatever would record one raises `UnsignedOrderError` before anything is
   queued (`check_orders`).
7. Keys are asked for anew each time. Other keys judge every order anew: one whose key was added counts, one whose key
   was taken away does not.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

import orjson
from sqlalchemy import Connection, Engine, select

from kvcustody.audit.kinds import Event, OrderSigned
from kvcustody.audit.kinds.event import GuardingOrder, LifecycleOrder
from kvcustody.audit.kinds.registry import KINDS, SIGNATURE
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.ledger import events
from kvcustody.errors import UnsignedOrderError
from kvcustody.signed_document import (
    DocumentRejected,
    DocumentSignature,
    PublicKey,
    check_signature,
    read_signature,
    signed_bytes,
)

SCHEMA: Final = "kvcustody/order@1"
ORDERS_OPTION = "kvcustody_orders"  # the execution option of an engine that says whose orders count
NO_KEY = (
    "This process has no key that signs orders (`order_key_path`), and under `policy_trust` nobody follows an unsigned "
    f"one: it refuses each ({UnsignedOrderError.code})."
)
SIGNED_LATER: Final = KINDS[OrderSigned].name
OrderKeys = Mapping[str, PublicKey]
_KEPT_MAX = 1 << 16
_REFUSED_MAX = 1000
_SHOWN_CHARACTERS = 64


class OwnKey(NamedTuple):
    """The key with which a process signs its orders; `sign` returns an Ed25519 signature."""

    name: str
    sign: Callable[[bytes], bytes]


class RefusedOrder(NamedTuple):
    """An order that nobody acts on: its leaf by process and sequence, and the reason."""

    kind: str
    log: str
    incarnation: str
    sequence: str
    why: str

    def __str__(self) -> str:
        return (
            f"`{self.kind}` in `{self.log}` (sequence {self.sequence} of {self.incarnation[:12]}) is not followed: "
            f"{self.why}"
        )


class _Verdicts:
    """Which leaves these keys signed, by digest: a bounded number; thread-safe. Other keys judge anew (rule 7)."""

    def __init__(self, keys: OrderKeys) -> None:
        self._lock = threading.Lock()
        self._keys = keys
        self._accepted: set[bytes] = set()
        self._refused: dict[bytes, RefusedOrder] = {}
        self._told: set[bytes] = set()

    def of(self, digest: bytes, keys: OrderKeys) -> tuple[bool, RefusedOrder | None]:
        """Return whether a leaf is known as accepted, and the reason if it is known as refused."""
        with self._lock:
            if keys is not self._keys:
                self._keys = keys
                self._accepted.clear()
                self._refused.clear()
            return digest in self._accepted, self._refused.get(digest)

    def accept(self, digest: bytes, keys: OrderKeys) -> None:
        """Remember a leaf that one of these keys signed."""
        with self._lock:
            if len(self._accepted) > _KEPT_MAX:
                self._accepted.clear()
            if keys is self._keys:
                self._accepted.add(digest)

    def refuse(self, digest: bytes, refused: RefusedOrder, keys: OrderKeys) -> None:
        """Remember a leaf that none of these keys signed."""
        with self._lock:
            if keys is self._keys and len(self._refused) < _REFUSED_MAX:
                self._refused[digest] = refused

    def newly_refused(self) -> tuple[RefusedOrder, ...]:
        """Those that no earlier call returned."""
        with self._lock:
            found = tuple(order for digest, order in self._refused.items() if digest not in self._told)
            self._told |= self._refused.keys() if len(self._told) < _KEPT_MAX else set()
        return found


class SignedOrders:
    """The trusted order keys of one ledger; thread-safe."""

    def __init__(self, audience: str, ledger: str, keys: Callable[[], OrderKeys], own: OwnKey | None = None) -> None:
        """`keys`: those that may sign orders now, by name; the same mapping while they are the same (rule 7).

        `own` None: this process signs nothing.
        """
        self._place = {"audience": audience, "ledger": ledger}
        self._keys = keys
        self._own = own
        self._verdicts = _Verdicts(keys())
        self._read_signed_later: Callable[[], frozenset[str]] = frozenset

    def over(self, connection: Connection) -> SignedOrders:
        """Return the same, with the orders that this ledger signed later (rule 5), read once when needed."""
        query = select(events.c.leaf).where(events.c.kind == SIGNED_LATER, has_leaf(events))
        return self._with(lambda: map(bytes, connection.scalars(query)))

    def beside(self, leaves: Iterable[bytes]) -> SignedOrders:
        """Return the same, with the orders that these leaves sign."""
        named = f'"kind":"{SIGNED_LATER}"'.encode()
        return self._with(lambda: (leaf for leaf in leaves if named in leaf))

    def _with(self, read: Callable[[], Iterable[bytes]]) -> SignedOrders:
        """Return the same, with the digests that the `order-signed` leaves of `read` name."""

        def signed_later() -> frozenset[str]:
            bodies = [self.accepted(leaf, SIGNED_LATER) for leaf in read()]
            return frozenset(str(body["digest"]) for body in bodies if body is not None)

        view = copy.copy(self)
        view._read_signed_later = functools.cache(signed_later)
        return view

    @property
    def may_sign(self) -> bool:
        """Whether this process may sign orders."""
        return self._own is not None and self._own.name in self._keys()

    def newly_refused(self) -> tuple[RefusedOrder, ...]:
        """Return the refused orders that no earlier call returned."""
        return self._verdicts.newly_refused()

    def sign(self, leaf: bytes) -> str:
        """Return the value of `signature` for an unsigned leaf; raises without an own key (rule 6)."""
        body = orjson.loads(leaf)
        if self._own is None or not self.may_sign:
            raise UnsignedOrderError(str(body["kind"]))
        form = DocumentSignature(self._own.name, self._own.sign(self._message(body))).form()
        return f"{form['key']} {form['signature']}"

    def accepted(self, leaf: bytes, kind: str) -> dict[str, Any] | None:
        """Return the content of a trusted order of this kind; None for any other leaf.

        One without a signature that counts is remembered (rule 4).
        """
        body = self._judged(leaf)
        return body if isinstance(body, dict) and body.get("kind") == kind else None

    def refusal(self, leaf: bytes) -> RefusedOrder | None:
        """Return why nobody acts on an order; None if its signature counts."""
        judged = self._judged(leaf)
        return judged if isinstance(judged, RefusedOrder) else None

    def _judged(self, leaf: bytes) -> dict[str, Any] | RefusedOrder:
        """What a leaf says whose signature counts, else why it does not count."""
        digest = hashlib.sha256(leaf).digest()
        keys = self._keys()
        is_known, refused = self._verdicts.of(digest, keys)
        if refused is not None and digest.hex() not in self._read_signed_later():
            return refused
        body: dict[str, Any] = {}
        try:
            body = dict(orjson.loads(leaf))
            if is_known or refused is not None:
                return body
            self._check(body, keys)
        except (DocumentRejected, ValueError, TypeError) as error:
            if digest.hex() in self._read_signed_later():
                return body
            why = error.message if isinstance(error, DocumentRejected) else "it is no leaf"
            names = (name for name in RefusedOrder._fields if name != "why")
            refused = RefusedOrder(**{name: str(body.get(name))[:_SHOWN_CHARACTERS] for name in names}, why=why)
            self._verdicts.refuse(digest, refused, keys)
            return refused
        self._verdicts.accept(digest, keys)
        return body

    def _check(self, body: Mapping[str, Any], keys: OrderKeys) -> None:
        """Raise `DocumentRejected` where no key that may sign orders signed this."""
        key, found, data = str(body.get(SIGNATURE, "")).rpartition(" ")
        if not found:
            raise DocumentRejected("it is not signed: sign it with `kvcustody policy sign-orders`, or repeat the order")
        unsigned = {name: value for name, value in body.items() if name != SIGNATURE}
        signature = read_signature({"key": key, "signature": data})
        check_signature(keys, signature, self._message(unsigned), "the order")

    def _message(self, unsigned: Mapping[str, Any]) -> bytes:
        return signed_bytes(SCHEMA, self._place | {"leaf": dict(unsigned)})


def check_orders(orders: SignedOrders, events: Iterable[Event]) -> None:
    """Raise `UnsignedOrderError` for the first order among these that nobody would follow (rule 6)."""
    if orders.may_sign:
        return
    for event in events:
        if isinstance(event, GuardingOrder | LifecycleOrder):
            raise UnsignedOrderError(KINDS[type(event)].name)


def authenticate(engine: Engine, orders: SignedOrders | None) -> None:
    """Make readers of this engine trust only these orders, and its writers sign theirs; None: rule 3."""
    engine.update_execution_options(**{ORDERS_OPTION: orders})


def orders_of(store: Engine | Connection) -> SignedOrders | None:
    """Return the orders that count here; None if every order does (rule 3). With a connection, by rule 5 too."""
    found: SignedOrders | None = store.get_execution_options().get(ORDERS_OPTION)
    return found.over(store) if found is not None and isinstance(store, Connection) else found
