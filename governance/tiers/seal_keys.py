"""Names and sealing keys of objects, derived from the secrets of tenant, subject and time.

    keys = SealKeys(keyring, shred_keys)
    key = keys.of(spec, subject_id, bucket_id)            # an `ExtendedNonceKey`, to be used and not kept
    name = keys.name(spec, last_block_key, shard=0, layout=digest)

1. A key needs all of these. When one of them is destroyed, nobody can make the key again.
   - the secret of the owner's epoch;
   - the subject's shred key, where the domain has one;
   - the shred key of the bucket in which the object's ceiling falls.
2. `look` drops the cached parts of destroyed keys, and every call looks first. Asking for a destroyed key raises.
3. While a key service is unreachable for too long, nothing is sealed or opened, and object keys are forgotten.
4. Nobody without the domain's secret can make a name or recognise which names belong together.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from kvcustody.errors import KeyServiceUnavailable, SealError
from kvcustody.governance.identity.domain_spec import DomainSpec
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.locked_buffer import KeyBuffer, derive
from kvcustody.governance.keys.shred_keys import ShredKeys
from kvcustody.governance.tiers.seal.extended_nonce import ExtendedNonceKey
from kvcustody.governance.tiers.seal.object_layout import NAME_BYTES, NO_SHRED

_CONTENT, _NAME, _SUBJECT, _BUCKET = (
    b"kvcustody/v1/tier/" + use for use in (b"content\0", b"name\0", b"subject\0", b"bucket\0")
)
_FACTS = b"kvcustody/v1/tier/facts"
_DOMAIN = b"domain"  # shorter than a block's key, so no object has this name
_Use = tuple[DomainSpec, bytes, bytes]


class _Naming(NamedTuple):
    """What names of a domain's objects begin with, and what facts call the domain."""

    state: hashlib.blake2b
    domain: bytes


class SealKeys:
    """Keys of objects over one keyring and one file of shred keys. Not thread-safe."""

    def __init__(self, keyring: Keyring, shred: ShredKeys, *, kept_max: int = 1_024) -> None:
        self._keyring = keyring
        self._shred = shred
        self._kept_max = kept_max
        self._keys: OrderedDict[_Use, ExtendedNonceKey] = OrderedDict()
        self._names: OrderedDict[DomainSpec, _Naming] = OrderedDict()
        self._catalogue: ExtendedNonceKey | None = None
        self._seen = keyring.changes
        self._shreds_seen = shred.changes()
        self._first, self._second, self._third, self._scratch = (KeyBuffer() for _ in range(4))

    def of(self, spec: DomainSpec, subject: bytes, bucket: bytes) -> ExtendedNonceKey:
        """Return the key of objects of `spec` under these shred keys; `subject` may be `NO_SHRED`.

        Raises `SealError` where a part of it is destroyed.
        """
        self.look()
        use = (spec, subject, bucket)
        key = self._keys.get(use)
        if key is not None:
            self._keys.move_to_end(use)
            return key
        for id_ in (subject, bucket):
            if id_ != NO_SHRED and not self._shred.is_living(id_):
                raise SealError(f"shred key `{id_.hex()}` is destroyed: its copies are erased")
        if len(self._keys) >= self._kept_max:
            self._drop(next(iter(self._keys)))
        key = self._keys[use] = self._made(spec, subject, bucket)
        return key

    def catalogue(self) -> ExtendedNonceKey:
        """Return the key of enclosed facts, for a process without an index of the objects."""
        if self._catalogue is None:
            with self._first as secret:
                self._shred.derive(_FACTS, secret)
                self._catalogue = ExtendedNonceKey(secret)
        return self._catalogue

    def has_epoch(self, spec: DomainSpec) -> bool:
        """Whether the domain owner's epoch is not destroyed; asks no key service."""
        return self._keyring.has_epoch(spec.owner, spec.key_epoch)

    def name(self, spec: DomainSpec, last: bytes, *, shard: int, layout: bytes) -> bytes:
        """Return the name of the object of `spec` whose last block has the key `last`, in one shard and layout."""
        return self.namer(spec, shard=shard, layout=layout)(last)

    def namer(self, spec: DomainSpec, *, shard: int, layout: bytes) -> Callable[[bytes], bytes]:
        """Return a function that names objects of `spec` by their last block's key; do not keep it."""
        copied, behind = self._naming(spec).state.copy, shard.to_bytes(2, "little") + layout

        def name(last: bytes) -> bytes:
            named = copied()
            named.update(last + behind)
            return named.digest()

        return name

    def domain(self, spec: DomainSpec) -> bytes:
        """Return 32 bytes that stand for the domain in facts; without its key nobody can link them to it."""
        return self._naming(spec).domain

    def _naming(self, spec: DomainSpec) -> _Naming:
        self.look()
        naming = self._names.get(spec)
        if naming is None:
            if len(self._names) >= self._kept_max:
                self._names.popitem(last=False)
            with self._first as secret:
                self._keyring.derive(spec.owner, spec.key_epoch, _NAME + spec.info, secret)
                state = hashlib.blake2b(key=secret.view(), digest_size=NAME_BYTES)
            named = state.copy()
            named.update(_DOMAIN)
            naming = self._names[spec] = _Naming(state, named.digest())
        return naming

    def look(self) -> None:
        """Drop destroyed keys. Raises `KeyServiceUnavailable` while the key service is away for too long (rule 3)."""
        self.drop_gone()
        if not self._keyring.may_seal:
            raise KeyServiceUnavailable(
                "the key service has been unreachable for too long: nothing is sealed or opened until it answers"
            )

    def drop_gone(self) -> None:
        """Drop cached epochs and shred keys that any process destroyed.

        While the key service is away for too long that is everything.
        """
        if not self._keyring.may_seal:
            self.close()
        if self._keyring.changes != self._seen:
            self._seen = self._keyring.changes
            self.close()
        changes = self._shred.changes()
        if changes != self._shreds_seen:
            self._shreds_seen = changes
            for use in list(self._keys):
                if not all(id_ == NO_SHRED or self._shred.is_living(id_) for id_ in use[1:]):
                    self._drop(use)

    def close(self) -> None:
        """Forget every key."""
        for use in list(self._keys):
            self._drop(use)
        self._names.clear()
        if self._catalogue is not None:
            self._catalogue.close()
            self._catalogue = None

    def _made(self, spec: DomainSpec, subject: bytes, bucket: bytes) -> ExtendedNonceKey:
        with self._first as owner, self._second as whose, self._third as sealing:
            self._keyring.derive(spec.owner, spec.key_epoch, _CONTENT + spec.info, owner)
            if subject != NO_SHRED:
                self._mix(owner, subject, _SUBJECT, whose)
            self._mix(whose if subject != NO_SHRED else owner, bucket, _BUCKET, sealing)
            return ExtendedNonceKey(sealing)

    def _mix(self, secret: KeyBuffer, shred: bytes, use: bytes, into: KeyBuffer) -> None:
        derive(secret, salt=self._shred.secret(shred).view(), info=use + shred, into=into, scratch=self._scratch)

    def _drop(self, use: _Use) -> None:
        key = self._keys.pop(use, None)
        if key is not None:
            key.close()
