"""Trees, proofs, notes and signatures from their definitions: RFC 6962, RFC 8032, C2SP signed-note and tlog-proof.

Nothing is shared with kvcustody, and only the standard library is used. Keys of kind ML-DSA-44 are not read.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

ED25519 = b"\x01"
_SEALED = b"kvcustody/sub-log-head@1\0"


class ProofError(Exception):
    """A proof, a note or a signature does not show what it should."""


def need(holds: bool, problem: str) -> None:
    """Raise `ProofError` unless something holds."""
    if not holds:
        raise ProofError(problem)


# -- trees (RFC 6962, section 2.1) ---------------------------------------------------------------------------------


def leaf_hash(leaf: bytes) -> bytes:
    """The hash of a leaf."""
    return hashlib.sha256(b"\0" + leaf).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """The hash of a node."""
    return hashlib.sha256(b"\1" + left + right).digest()


def tree_root(hashes: Iterable[bytes]) -> bytes:
    """The root over leaf hashes. Whole subtrees are kept by their heights, the largest first."""
    subtrees: list[tuple[int, bytes]] = []
    for each in hashes:
        height, node = 0, each
        while subtrees and subtrees[-1][0] == height:
            height, node = height + 1, node_hash(subtrees.pop()[1], node)
        subtrees.append((height, node))
    if not subtrees:
        return hashlib.sha256().digest()
    node = subtrees.pop()[1]
    while subtrees:
        node = node_hash(subtrees.pop()[1], node)
    return node


def _split(size: int) -> int:
    """The largest power of two below a size."""
    return 1 << ((size - 1).bit_length() - 1)


def root_by_path(leaf: bytes, index: int, size: int, path: Sequence[bytes]) -> bytes:
    """The root that an inclusion path leads to from a leaf hash."""
    need(0 <= index < size and (bool(path) or size == 1), "a path is too short, or of no leaf of the tree")
    if size == 1:
        need(not path, "a path is too long")
        return leaf
    middle = _split(size)
    if index < middle:
        return node_hash(root_by_path(leaf, index, middle, path[:-1]), path[-1])
    return node_hash(path[-1], root_by_path(leaf, index - middle, size - middle, path[:-1]))


def consistency_path(hashes: Sequence[bytes], old: int, is_whole: bool = True) -> list[bytes]:
    """The proof that the first `old` leaves are the beginning of the tree over these hashes."""
    size = len(hashes)
    if old == size:
        return [] if is_whole else [tree_root(hashes)]
    middle = _split(size)
    if old <= middle:
        return [*consistency_path(hashes[:middle], old, is_whole), tree_root(hashes[middle:])]
    return [*consistency_path(hashes[middle:], old - middle, False), tree_root(hashes[:middle])]


# -- signatures (RFC 8032, section 5.1); a point is (X, Y, Z, T) with x = X/Z, y = Y/Z, xy = T/Z --------------------

_P = 2**255 - 19
_ORDER = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, -1, _P) % _P
_Point = tuple[int, int, int, int]


def _add(one: _Point, other: _Point) -> _Point:
    a = (one[1] - one[0]) * (other[1] - other[0]) % _P
    b = (one[1] + one[0]) * (other[1] + other[0]) % _P
    c, d = 2 * one[3] * other[3] * _D % _P, 2 * one[2] * other[2] % _P
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


def _times(number: int, point: _Point) -> _Point:
    made: _Point = (0, 1, 1, 0)
    while number:
        if number & 1:
            made = _add(made, point)
        point, number = _add(point, point), number >> 1
    return made


def _point(data: bytes) -> _Point:
    number = int.from_bytes(data, "little")
    odd, y = number >> 255, number & (2**255 - 1)
    need(y < _P, "a point is not on the curve")
    square = (y * y - 1) * pow(_D * y * y + 1, -1, _P) % _P
    x = pow(square, (_P + 3) // 8, _P)
    if x * x % _P != square:
        x = x * pow(2, (_P - 1) // 4, _P) % _P
    need(x * x % _P == square and not (x == 0 and odd), "a point is not on the curve")
    x = x if x & 1 == odd else _P - x
    return x, y, 1, x * y % _P


def ed25519_verifies(public: bytes, message: bytes, signature: bytes) -> bool:
    """Whether a signature is the key's: S·B = R + k·A."""
    if len(public) != 32 or len(signature) != 64:
        return False
    s = int.from_bytes(signature[32:], "little")
    if s >= _ORDER:
        return False
    try:
        key, claimed = _point(public), _point(signature[:32])
    except ProofError:
        return False
    base = _point((4 * pow(5, -1, _P) % _P).to_bytes(32, "little"))
    k = int.from_bytes(hashlib.sha512(signature[:32] + public + message).digest(), "little") % _ORDER
    left, right = _times(s, base), _add(claimed, _times(k, key))
    return all((left[place] * right[2] - right[place] * left[2]) % _P == 0 for place in (0, 1))


# -- notes and keys (C2SP signed-note, tlog-checkpoint) ------------------------------------------------------------


class Key(NamedTuple):
    """A verifier key: its name, its id, and its 32 bytes."""

    name: str
    id: bytes
    public: bytes


class Head(NamedTuple):
    """A log's size and root."""

    size: int
    root: bytes


def parse_key(text: str) -> Key:
    """A key from its vkey, `name+id+base64`."""
    name, stated, encoded = text.split("+", 2)
    data = base64.b64decode(encoded, validate=True)
    need(data[:1] == ED25519, f"`{name}` is a key of a kind that is not read here")
    made = Key(name, hashlib.sha256(name.encode() + b"\n" + data).digest()[:4], data[1:])
    need(made.id.hex() == stated, f"`{text}` does not have the id that it states")
    return made


def open_note(note: str, keys: Sequence[Key]) -> tuple[str, tuple[Key, ...]]:
    """The text of a note and who of these keys signed it; one of theirs that does not verify refuses the note."""
    text, lines = note[: note.rindex("\n\n") + 1], note[note.rindex("\n\n") + 2 :]
    signed = []
    for line in lines.splitlines():
        dash, name, encoded = line.split(" ")
        need(dash == "—", "a line of a note is none of a signature")
        data = base64.b64decode(encoded, validate=True)
        for key in keys:
            if (key.name, key.id) == (name, data[:4]):
                need(_verifies(key, text, data[4:]), f"the signature of `{name}` does not verify")
                signed.append(key)
    return text, tuple(signed)


@lru_cache(maxsize=4096)
def _verifies(key: Key, text: str, signature: bytes) -> bool:
    return ed25519_verifies(key.public, text.encode(), signature)


def open_checkpoint(note: str, keys: Sequence[Key]) -> tuple[str, Head]:
    """Origin and head of a checkpoint that one of its log's keys signed."""
    text, signed = open_note(note, keys)
    origin, size, root = text.splitlines()[:3]
    need(any(key.name == origin for key in signed), "the checkpoint is not signed by a key that was given")
    return origin, Head(int(size), base64.b64decode(root))


class Turn(NamedTuple):
    """A key's time: up to the tree of this head, where it handed over (None: it has not)."""

    key: Key
    until: Head | None

    def may_sign(self, size: int) -> bool:
        """Whether a tree of so many leaves, or a report of it, may be signed by it."""
        return self.until is None or size <= self.until.size


def keys_in_turn(first: Key, records: Sequence[bytes]) -> list[Turn]:
    """A key and those that it handed over to on record, in order; records from before it say nothing.

    A record is a note that the old key and the new one signed; it names both and the tree of that moment.
    """
    turns: list[Turn] = []
    key = first
    for record in records:
        note = record.decode()
        text = note[: note.rindex("\n\n") + 1]
        fields = dict(line.split(" ", 1) for line in text.splitlines()[1:])
        need(text.startswith("kvcustody/key-rotation@1\n"), "a record is of no handover")
        old, new = parse_key(fields["from"]), parse_key(fields["to"])
        if not turns and old != key:
            continue
        need(old == key, "a handover does not continue the chain of keys")
        need(set(open_note(note, [old, new])[1]) == {old, new}, "a handover is not signed by both")
        turns.append(Turn(old, Head(int(fields["size"]), base64.b64decode(fields["root"]))))
        key = new
    return [*turns, Turn(key, None)]


# -- proofs of heads and leaves ------------------------------------------------------------------------------------


class Opened(NamedTuple):
    """What a leaf of the root log stands for: a sub-log's name and its head."""

    name: str
    head: Head


def open_root_leaf(leaf: bytes, opening: bytes) -> Opened:
    """The sub-log's head that an opening shows to be behind a root leaf (HMAC-SHA-256 under its salt)."""
    salt, rest = opening[:32], opening[32:]
    need(hmac.digest(salt, _SEALED + rest, "sha256") == leaf, "an opening is not of its leaf of the root log")
    return Opened(rest[40:].decode(), Head(int.from_bytes(rest[:8], "big"), rest[8:40]))


def check_leaf_proof(proof: str, leaf: bytes, keys: Sequence[Key]) -> tuple[str, int, str]:
    """The log and place where a proof shows a leaf to be, and the note that it ends in."""
    of_leaf, of_head, note = proof.split("\n\n", 2)
    kind, *leaf_lines = of_leaf.split("\n")
    head_kind, extra, *head_lines = of_head.split("\n")
    need((kind, head_kind) == ("kvcustody/leaf-proof@1", "c2sp.org/tlog-proof@v1"), "this is no leaf's proof")
    opening = base64.b64decode(extra.removeprefix("extra "), validate=True)
    sealed = hmac.digest(opening[:32], _SEALED + opening[32:], "sha256")
    name, head = open_root_leaf(sealed, opening)
    index, path = _index_and_path(leaf_lines)
    need(root_by_path(leaf_hash(leaf), index, head.size, path) == head.root, "a leaf is not in its log's tree")
    _, root = open_checkpoint(note, keys)
    at, above = _index_and_path(head_lines)
    need(root_by_path(leaf_hash(sealed), at, root.size, above) == root.root, "a head is not in the root log")
    return name, index, note


def _index_and_path(lines: Sequence[str]) -> tuple[int, list[bytes]]:
    return int(lines[0].removeprefix("index ")), [base64.b64decode(line, validate=True) for line in lines[1:]]
