"""Reads foreign engines' payloads for observation: bounded, counted, never trusted.

1. Every form of vLLM and SGLang is read: events as maps (since June 2026) and as arrays (before), hashes as bytes or
   integers, unknown fields and trailing elements skipped. So is Mooncake's standard form, its tenant id as a salt.
2. Token ids are never decoded: an observer has no use for them, so it cannot leak them.
3. Whatever the bytes are, `read` returns. What it cannot read is counted: an event that is malformed, an event of an
   unknown kind, or a payload that is no batch at all.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import msgspec

from kvcustody.integrations.events import mooncake_wire
from kvcustody.integrations.events.custody_field import CustodyField

HASH_BYTES_MAX = 64
SALTS_MAX = 8
Hash = bytes | int


class StoredBlocks(NamedTuple):
    """Blocks of one chain that entered an engine's cache. `salts`: candidates for its salt, if it has one."""

    hashes: list[Hash]
    parent: Hash | None
    medium: str
    group: int
    salts: tuple[str, ...]
    custody: CustodyField | None


class Removed(NamedTuple):
    """Blocks that left an engine's cache."""

    hashes: list[Hash]
    medium: str
    group: int


class Cleared(NamedTuple):
    """An engine's emptied cache."""


class ClearedTenant(NamedTuple):
    """A cache that has nothing more of one tenant in one medium."""

    medium: str
    salts: tuple[str, ...]
    custody: CustodyField | None


Incoming = StoredBlocks | Removed | Cleared | ClearedTenant


class Payload(NamedTuple):
    """The content of one payload. `utc_us`: the engine's own time; 0 where it gave none that is plausible."""

    utc_us: int
    events: tuple[Incoming, ...]
    malformed: int = 0
    unknown: int = 0


class _StoredMap(msgspec.Struct, gc=False, tag="BlockStored"):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    cache_salt: str | None = None
    kvcustody: CustodyField | None = None
    event_type: str | None = None  # Mooncake's master writes its own form with vLLM's names beside it


class _RemovedMap(msgspec.Struct, gc=False, tag="BlockRemoved"):
    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None
    event_type: str | None = None


class _ClearedMap(msgspec.Struct, gc=False, tag="AllBlocksCleared"):
    event_type: str | None = None


class _StoredArray(msgspec.Struct, array_like=True, gc=False, tag="BlockStored"):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    seventh: Any = None  # vLLM: the LoRA name; SGLang: a map with the salt
    extra_keys: Any = None
    group_idx: Any = None


class _RemovedArray(msgspec.Struct, array_like=True, gc=False, tag="BlockRemoved"):
    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: Any = None


class _ClearedArray(msgspec.Struct, array_like=True, gc=False, tag="AllBlocksCleared"):
    pass


_Map = _StoredMap | _RemovedMap | _ClearedMap
_Array = _StoredArray | _RemovedArray | _ClearedArray


class _MapBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_Map]


class _RawBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]


class _Tagged(msgspec.Struct):
    type: str = ""
    event_type: str = ""


_whole = msgspec.msgpack.Decoder(_MapBatch)
_loose = msgspec.msgpack.Decoder(_RawBatch)
_map = msgspec.msgpack.Decoder(_Map)
_array = msgspec.msgpack.Decoder(_Array)
_tag = msgspec.msgpack.Decoder(_Tagged)
_KNOWN_KINDS = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared", "stored", "removed", "cleared"})
_GPU = "GPU"
_MILLISECONDS = 1000.0
_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError, MemoryError, OverflowError)


def read(payload: bytes) -> Payload:
    """Return a payload's content, as far as it can be read (rule 3)."""
    try:
        whole = _whole.decode(payload)
        if any(event.event_type is not None for event in whole.events):
            raise ValueError("events in the standard form, with aliases")
        found = [_plain(event) for event in whole.events]
        return Payload(_utc_us(whole.ts), tuple(event for event in found if event is not None), found.count(None))
    except _UNREADABLE:
        pass
    try:
        loose = _loose.decode(payload)
    except _UNREADABLE:
        return Payload(0, (), malformed=1)
    events: list[Incoming] = []
    malformed = unknown = 0
    scale = 1.0
    for raw in loose.events:
        event = _one(raw)
        if event is None and (event := _standard(raw)) is not None:
            scale = _MILLISECONDS
        if event is None:
            known = _kind(raw) in _KNOWN_KINDS
            malformed += known
            unknown += not known
        else:
            events.append(event)
    return Payload(_utc_us(loose.ts / scale), tuple(events), malformed, unknown)


def _one(raw: msgspec.Raw) -> Incoming | None:
    try:
        event = (_array if _is_array(raw) else _map).decode(raw)
        if isinstance(event, _StoredMap | _RemovedMap | _ClearedMap) and event.event_type is not None:
            return None
        return _plain(event)
    except _UNREADABLE:
        return None


def _standard(raw: msgspec.Raw) -> Incoming | None:
    """Return an event in Mooncake's form; None where it cannot be read."""
    try:
        event = mooncake_wire.read_event(raw)
        medium = (event.medium or _GPU).upper()
        if isinstance(event, mooncake_wire.ReadCleared):
            return ClearedTenant(medium, (event.tenant_id,), event.kvcustody)
        hashes: list[Hash] = [*mooncake_wire.places_of(event)]
        if not hashes:
            return None
        if isinstance(event, mooncake_wire.ReadRemoved):
            return Removed(hashes, medium, 0)
        parent = event.parent_hash
        before = None if parent is None else mooncake_wire.place_of(event.tenant_id, parent)
        return StoredBlocks(hashes, before, medium, 0, (event.tenant_id,), event.kvcustody)
    except _UNREADABLE:
        return None


def _is_array(raw: msgspec.Raw) -> bool:
    first = memoryview(raw)[0]
    return first & 0xF0 == 0x90 or first in (0xDC, 0xDD)


def _kind(raw: msgspec.Raw) -> str:
    """Return the tag of an unreadable event; empty where even the tag is malformed."""
    try:
        if not _is_array(raw):
            tagged = _tag.decode(raw)
            return tagged.type or tagged.event_type
        head = msgspec.msgpack.decode(raw, type=list[msgspec.Raw])
        return msgspec.msgpack.decode(head[0], type=str) if head else ""
    except _UNREADABLE:
        return ""


def _plain(event: _Map | _Array) -> Incoming | None:
    """Return the event without its envelope; None where a hash has an implausible size."""
    if isinstance(event, _ClearedMap | _ClearedArray):
        return Cleared()
    if any(type(one) is bytes and not 0 < len(one) <= HASH_BYTES_MAX for one in event.block_hashes):
        return None
    medium = event.medium or _GPU
    group = event.group_idx if type(event.group_idx) is int else 0
    if isinstance(event, _RemovedMap | _RemovedArray):
        return Removed(event.block_hashes, medium, group)
    custody = event.kvcustody if isinstance(event, _StoredMap) else None
    return StoredBlocks(event.block_hashes, event.parent_block_hash, medium, group, _salts(event), custody)


def _salts(event: _StoredMap | _StoredArray) -> tuple[str, ...]:
    """Return the strings that may be the salt: SGLang names it, vLLM puts it after the LoRA name in a block's keys."""
    if isinstance(event, _StoredMap):
        named, lora = event.cache_salt, event.lora_name
    else:
        seventh = event.seventh
        lora = seventh if isinstance(seventh, str) else None
        named = seventh.get("cache_salt") if isinstance(seventh, dict) else None
    if isinstance(named, str):
        return (named,)
    keys = event.extra_keys
    first = keys[0] if isinstance(keys, list) and keys else None
    if not isinstance(first, list | tuple):
        return ()
    strings = [item for item in first if isinstance(item, str)]
    if lora is not None and strings[:1] == [lora]:
        strings = strings[1:]
    return tuple(strings[:SALTS_MAX])


def _utc_us(ts_seconds: float) -> int:
    return int(ts_seconds * 1_000_000) if math.isfinite(ts_seconds) and 0 < ts_seconds < 1e11 else 0
