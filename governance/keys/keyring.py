"""Every tenant's random secrets by key epoch: creation, rotation, derivation, destruction.

- Each (owner, epoch) has its own random secret. It is stored only wrapped, and is in memory only in a
  `KeyBuffer`.
- A key is HKDF-SHA256 of that secret with `info` = canonical bytes of everything that separates uses. Same
  root and store: same keys in every process. Without the secret nothing about them can be computed.
- An owner has one current epoch, under which new content is keyed. Older epochs stay readable until they are
  destroyed.
- After `destroy`, no wrapped copy, buffer or primed state of the epoch is left here, and its number is never
  used again.
- What happened is returned as `KeyFact`s for the ledger; a fact is returned only for what is durable in the
  store.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from kvcustody.audit.evidence.query.key_orders import CLOCKS_DIFFER_US
from kvcustody.clock import Clock
from kvcustody.errors import KeyringError, KeyServiceUnavailable, NoKeyError
from kvcustody.governance.identity.domain_spec import KeyOwner
from kvcustody.governance.keys.domain_key_cache import DomainKeys
from kvcustody.governance.keys.key_backups import KeyBackups
from kvcustody.governance.keys.locked_buffer import KEY_BYTES, KeyBuffer, derive
from kvcustody.governance.keys.root_key_wrapping import KeyEnd, WrappingPort
from kvcustody.governance.keys.wrapped_key_store import (
    BACKED_UP,
    EndingKey,
    FileKeyStore,
    KeyDocument,
    KeyStore,
    WrappedEpoch,
)
from kvcustody.logger import get_logger
from kvcustody.plurals import several

REWRAP_BATCH = 100
_ENDS_SECONDS = 5.0
_log = get_logger(__name__)
_DERIVATION_SALT = b"kvcustody/v1/derived-key"


class KeyFact(NamedTuple):
    """One durable change of the keyring. `in_service`: what a key service does with the epoch's own key, if there is
    one.

    `owed`: it is to be asked; `still-owed`: an earlier process was to ask, and may have died before it said so;
    `pending`: it destroys the key, or the last known backup of the key store goes, at `ends_utc` (µs); `gone`.
    """

    kind: Literal["created", "rotated", "destroyed", "rewrapped"]
    owner: KeyOwner
    epoch: int
    utc_us: int
    in_service: Literal["", "owed", "still-owed", "pending", "gone"] = ""
    ends_utc: int = 0


class DestroyReceipt(NamedTuple):
    """What destroying one epoch removed; `method` says how. Storage media may keep more (docs/concepts/keys.md)."""

    fact: KeyFact
    wrapped_copies: int
    buffers_wiped: int
    states_dropped: int
    method: str


class Keyring:
    """The secrets of one deployment, over a wrapping port and a store. `domains` holds primed states."""

    def __init__(
        self,
        store: KeyStore,
        port: WrappingPort,
        clock: Clock,
        *,
        secrets_max: int = 1_024,
        states_max: int = 16_384,
        states_per_owner_max: int = 1_024,
    ) -> None:
        self._store = store
        self._port = port
        self._clock = clock
        self._secrets_max = secrets_max
        self._secrets: OrderedDict[tuple[KeyOwner, int], KeyBuffer] = OrderedDict()
        self._doomed: set[tuple[KeyOwner, int]] = set()  # refused here from the moment `destroy` is called
        self._not_ended: set[tuple[KeyOwner, int]] = set()  # a key service was asked last in vain
        self._scratch = KeyBuffer(KEY_BYTES)
        self._lock = threading.RLock()
        self._document = store.load()
        self._made_us = {key: stored.created_utc_us for key, stored in self._document.epochs.items()}
        self._left_owed = [key for key, one in self._document.ending.items() if not one.until_us]
        self.changes = 0  # rises whenever an epoch begins or ends here: what holds states compares it and rebuilds
        self.domains = DomainKeys(self.derive, states_max=states_max, states_per_owner_max=states_per_owner_max)

    def current(self, owner: KeyOwner) -> int | None:
        """Return the epoch that keys the owner's new content; `None` without one (see `ensure`)."""
        epoch = self._document.latest.get(owner)
        return epoch if epoch is not None and self._readable((owner, epoch)) else None

    def epochs(self, owner: KeyOwner) -> tuple[int, ...]:
        """Return the owner's readable epochs, ascending."""
        return tuple(sorted(key[1] for key in self._document.epochs if key[0] == owner and self._readable(key)))

    def owners(self) -> tuple[KeyOwner, ...]:
        """Return every owner with a readable epoch."""
        return tuple(sorted({key[0] for key in self._document.epochs if self._readable(key)}))

    def ensure(self, owners: Iterable[KeyOwner]) -> tuple[KeyFact, ...]:
        """Create an epoch for each owner without one, in one durable save; returns the facts of new ones."""
        wanted = [owner for owner in dict.fromkeys(owners) if self.current(owner) is None]
        if not wanted:
            return ()
        with self._lock, self._store.exclusive():
            document = self._reload()
            missing = [owner for owner in wanted if self.current(owner) is None]
            facts = tuple(self._new_epoch(document, owner, "created") for owner in missing)
            if facts:
                self._save(document)
        return facts

    def rotate(self, owner: KeyOwner) -> KeyFact:
        """Start the owner's next epoch. The old one stays readable until `destroy`."""
        with self._lock, self._store.exclusive():
            document = self._reload()
            if owner not in document.latest:
                raise KeyringError(f"{owner}: has no key epoch to rotate", owner=owner)
            fact = self._new_epoch(document, owner, "rotated")
            self._save(document)
        return fact

    def rotate_older(self, owner: KeyOwner, before_us: int) -> KeyFact | None:
        """Start the owner's next epoch; returns None where the current one is from `before_us` (UTC) or later.

        The new one counts as made at `before_us` or later, whatever this machine's clock says.
        """
        with self._lock, self._store.exclusive():
            document = self._reload()
            epoch = document.latest.get(owner, 0)
            is_newer = (owner, epoch) in document.epochs and not self._is_before(owner, epoch, before_us)
            if owner not in document.latest or is_newer:
                return None
            fact = self._new_epoch(document, owner, "rotated", not_before_us=before_us)
            self._save(document)
        return fact

    def epochs_before(self, owner: KeyOwner, before_us: int) -> tuple[int, ...]:
        """Return the owner's readable epochs from before a moment (UTC), ascending."""
        return tuple(epoch for epoch in self.epochs(owner) if self._is_before(owner, epoch, before_us))

    def _is_before(self, owner: KeyOwner, epoch: int, before_us: int) -> bool:
        """Whether an epoch is from before a moment.

        No wrap says when its epoch was made: whoever writes the file does. So a time that this process has read stays,
        and one that is later than clocks differ is none.
        """
        said_us = self._document.epochs[owner, epoch].created_utc_us
        made_us = min(said_us, self._made_us.get((owner, epoch), said_us))
        return made_us < before_us or made_us > max(before_us, self._clock.utc_us()) + CLOCKS_DIFFER_US

    def destroy(self, owner: KeyOwner, epoch: int) -> DestroyReceipt:
        """Destroy one epoch: states, buffers, then every wrapped copy. Its blocks are never found again.

        The epoch stops serving reads before the store is written: if that fails, an error is raised, this
        process still refuses the epoch, and `destroy` may be called again.
        """
        with self._lock, self._store.exclusive():
            document = self._reload()
            if (owner, epoch) not in document.epochs:
                raise _absent(owner, epoch)
            self._doomed.add((owner, epoch))
            self.changes += 1
            states = self.domains.drop_epoch(owner, epoch)
            buffers = self._wipe(owner, epoch)
            del document.epochs[owner, epoch]
            at = self._clock.utc_us()
            document.destroyed[owner, epoch] = at
            under = self._port.ends_under or (BACKED_UP if self._may_be_backed_up(at) else "")
            if under:
                document.ending[owner, epoch] = EndingKey(0, under)
            self._save(document)
        fact = KeyFact("destroyed", owner, epoch, at, "owed" if under else "")
        return DestroyReceipt(fact, 1, buffers, states, "wrapped copy removed from the store, memory wiped")

    def take_left_owed(self) -> tuple[KeyFact, ...]:
        """Return, once, the key service's destructions that were pending when this process began."""
        left, self._left_owed = self._left_owed, []
        return tuple(
            KeyFact("destroyed", owner, epoch, self._clock.utc_us(), "still-owed")
            for owner, epoch in left
            if (owner, epoch) in self._document.ending
        )

    def end_in_service(self) -> tuple[KeyFact, ...]:
        """Have the key service destroy the keys of destroyed epochs, and check those that it had scheduled.

        Without a service: look whether known backups of the key store still have them (`key_backups`).
        On any thread: the service is asked outside the lock. One that does not answer is asked again by the next call,
        and so is one that refuses to end a key, behind the others. A call asks for no longer than `_ENDS_SECONDS`: who
        makes it has other orders to hear.
        """
        facts = []
        document, began = self._document, time.monotonic()
        for (owner, epoch), ending in sorted(document.ending.items(), key=lambda one: one[0] in self._not_ended):
            if (owner, epoch) in document.epochs:
                continue
            is_backed_up = ending.under == BACKED_UP
            if ending.until_us > self._clock.utc_us() and not is_backed_up:
                continue
            if ending.under != self._port.ends_under and not is_backed_up:
                _log.error(
                    "a destroyed epoch's key is under another root in its key service; put back its wrapped root key",
                    under=ending.under,
                )
                continue
            if time.monotonic() - began > _ENDS_SECONDS:
                break
            try:
                if is_backed_up:
                    end = KeyEnd(self._backed_up_until(document.destroyed[owner, epoch]))
                else:
                    end = self._port.end_epoch(owner, epoch)
            except NoKeyError as error:
                self._not_ended.add((owner, epoch))
                _log.warning("a destroyed epoch's key may still be recoverable", why=error.message)
                if isinstance(error, KeyServiceUnavailable):
                    break
                continue
            self._not_ended.discard((owner, epoch))
            with self._lock, self._store.exclusive():
                now = self._reload()
                if now.ending.get((owner, epoch)) != ending or end.until_us == ending.until_us > 0:
                    continue  # another process has seen it, or there is nothing new
                if end.until_us:
                    now.ending[owner, epoch] = ending._replace(until_us=end.until_us)
                else:
                    del now.ending[owner, epoch]
                self._save(now)
            state: Literal["pending", "gone"] = "pending" if end.until_us else "gone"
            facts.append(KeyFact("destroyed", owner, epoch, self._clock.utc_us(), state, end.until_us))
        return tuple(facts)

    def _may_be_backed_up(self, destroyed_us: int) -> bool:
        """Whether a known backup has what is destroyed now; of what cannot be read too, which is looked at again."""
        try:
            return bool(self._backed_up_until(destroyed_us))
        except KeyringError:
            return True

    def _backed_up_until(self, destroyed_us: int) -> int:
        """Until when a known backup of the key store from before a moment opens; 0: none does."""
        if not isinstance(self._store, FileKeyStore):
            return 0
        return KeyBackups(self._store.path).open_until(destroyed_us, self._clock.utc_us())

    @property
    def may_seal(self) -> bool:
        """Whether tiers may use derived keys: not while a key service is away for too long. Never waits."""
        return self._port.may_seal()

    def rewrap(
        self, port: WrappingPort, progress: Callable[[int, int], object] = lambda done, of: None
    ) -> tuple[KeyFact, ...]:
        """Move every epoch to another root key or key service; the old one may then be destroyed.

        Saved after every `REWRAP_BATCH` epochs, so that a call that was cut short is made again and goes on: an epoch
        that only the new one opens stays as it is. `progress(done, of)` is called after each save. Facts are of those
        that were moved. Raises `KeyringError` for an epoch that neither opens, and while a key service is still to
        destroy keys of destroyed epochs: under the new root nobody could ask for them.
        """
        facts = []
        with self._lock, self._store.exclusive():
            document = self._reload()
            if left := sum(one.under not in (port.ends_under, BACKED_UP) for one in document.ending.values()):
                raise KeyringError(
                    f"{several(left, 'key')} of destroyed epochs are to go from the key service first; start a worker "
                    "until `kvcustody keys orders` shows none"
                )
            every = sorted(document.epochs)
            for start in range(0, len(every), REWRAP_BATCH):
                batch = every[start : start + REWRAP_BATCH]
                for owner, epoch in batch:
                    if self._moved(document, port, owner, epoch):
                        facts.append(KeyFact("rewrapped", owner, epoch, self._clock.utc_us()))
                self._save(document)
                progress(start + len(batch), len(every))
            self._port = port
        return tuple(facts)

    def _moved(self, document: KeyDocument, port: WrappingPort, owner: KeyOwner, epoch: int) -> bool:
        stored = document.epochs[owner, epoch]
        try:
            secret = self._port.unwrap(stored.wrapped, owner=owner, epoch=epoch)
        except KeyringError:
            port.unwrap(stored.wrapped, owner=owner, epoch=epoch).wipe()
            return False
        with secret:
            wrapped = port.wrap(secret, owner=owner, epoch=epoch)
        document.epochs[owner, epoch] = stored._replace(wrapped=wrapped)
        return True

    def derive(self, owner: KeyOwner, epoch: int, info: bytes, into: KeyBuffer) -> None:
        """Fill `into` with the key for `info` under an owner's epoch. The caller wipes it."""
        with self._lock:
            secret = self._secret(owner, epoch)
            derive(secret, salt=_DERIVATION_SALT, info=info, into=into, scratch=self._scratch)

    def refresh(self) -> None:
        """Read the store again, and forget keys that another process destroyed."""
        with self._lock:
            self._reload()

    def close(self) -> None:
        """Wipe every secret and drop every state held in memory."""
        with self._lock:
            self.domains.drop_all()
            for owner, epoch in list(self._secrets):
                self._wipe(owner, epoch)

    def _secret(self, owner: KeyOwner, epoch: int) -> KeyBuffer:
        key = (owner, epoch)
        secret = self._secrets.get(key)
        if secret is not None and secret.filled:
            self._secrets.move_to_end(key)
            return secret
        stored = self._document.epochs.get(key)
        if stored is None or key in self._doomed:
            raise _absent(owner, epoch)
        self._wipe(owner, epoch)  # a forked parent's buffer reads as zeros here
        if len(self._secrets) >= self._secrets_max:
            self._wipe(*next(iter(self._secrets)))
        secret = self._port.unwrap(stored.wrapped, owner=owner, epoch=epoch)
        self._secrets[key] = secret
        return secret

    def has_epoch(self, owner: KeyOwner, epoch: int) -> bool:
        """Whether the store has an epoch; no key service is asked."""
        return self._readable((owner, epoch))

    def _readable(self, key: tuple[KeyOwner, int]) -> bool:
        return key in self._document.epochs and key not in self._doomed

    def _wipe(self, owner: KeyOwner, epoch: int) -> int:
        secret = self._secrets.pop((owner, epoch), None)
        if secret is None:
            return 0
        secret.wipe()
        return 1

    def _new_epoch(
        self,
        document: KeyDocument,
        owner: KeyOwner,
        kind: Literal["created", "rotated"],
        *,
        not_before_us: int = 0,
    ) -> KeyFact:
        epoch = document.latest.get(owner, 0) + 1
        at = max(self._clock.utc_us(), not_before_us)
        with KeyBuffer.random(KEY_BYTES) as secret:
            document.epochs[owner, epoch] = WrappedEpoch(self._port.wrap(secret, owner=owner, epoch=epoch), at)
        document.latest[owner] = epoch
        return KeyFact(kind, owner, epoch, at)

    def _reload(self) -> KeyDocument:
        """The store's document, to be changed; what another process destroyed leaves this one's memory."""
        self._adopt(self._store.load())
        for owner, epoch in [key for key in self._secrets if key not in self._document.epochs]:
            self._wipe(owner, epoch)
        self.domains.keep_only(self._document.epochs.keys())
        return self._document.copy()

    def _save(self, document: KeyDocument) -> None:
        self._store.save(document)
        self._adopt(document)

    def _adopt(self, document: KeyDocument) -> None:
        self.changes += document.epochs.keys() != self._document.epochs.keys()
        self._document = document
        for key, stored in document.epochs.items():
            self._made_us.setdefault(key, stored.created_utc_us)
        for key in [key for key in self._made_us if key not in document.epochs]:
            del self._made_us[key]


def _absent(owner: KeyOwner, epoch: int) -> KeyringError:
    return KeyringError(f"{owner}: epoch `{epoch}` does not exist or is destroyed", owner=owner, epoch=epoch)
