#!/usr/bin/env python3
"""Checks an export of a kvcustody ledger, with Python alone: no package is needed, and no network.

    python3 -I verify_kvcustody.py EXPORT --key 'ledger.example.com+1a2b3c4d+AbC…'

EXPORT is the folder, or NAME.proof beside NAME.leaf for one leaf that was mailed (then 1, 2, 3 and 7 are checked, and
no handovers). The key is the ledger's public key, from somebody you trust and NOT from the export. Take this program
from somewhere you trust too: a forged export may come with a forged copy of it.

What is checked, in this order:
  1. The checkpoint is signed by the key (Ed25519; a C2SP signed note), or by one that it handed over to: each
     handover is signed by both keys, is a leaf of the system log, and names a tree that is the beginning of the
     signed one. A key that was handed over signs nothing later. The checkpoint states the root of the root log.
  2. Each sub-log's head opens a leaf of the root log that the checkpoint covers.
  3. The leaves give that head: hashed as RFC 6962 says, they lead to its root, none changed, missing, added or moved.
  4. Every file has the digest and the size that the manifest states, each leaf names the log that it is in, and the
     folder holds the manifest's files alone: a stray log, tile, folder or link is refused.
  5. Where the export is of the whole ledger: every leaf of the root log opens to a head that the leaves give, so that
     no sub-log was left out and none had two histories.
  6. With --head, that a head that you kept from earlier is the beginning of what you were given.
  7. With --witness, that this witness signed the checkpoint, and when. Timestamps (RFC 3161) are tied to the
     checkpoint here; their tokens are checked by `openssl ts -verify`. The end says what this does NOT show. Exit
     status: 0 sound, 1 not, 2 cannot be checked.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import hmac
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Point = tuple[int, int, int, int]
Key = tuple[str, bytes, int, bytes]  # name, id, type, public key
Kept = tuple[int, bytes, str]  # size, root, log
Heads = dict[str, dict[int, bytes]]  # root by size, by log

# --- Ed25519 (RFC 8032, section 5.1), verification alone ------------------------------------------------------------

P = 2**255 - 19
ORDER = 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, P - 2, P) % P


def _point(data: bytes) -> Point | None:
    """A curve point in extended coordinates from its 32 bytes; None where there is none."""
    y = int.from_bytes(data, "little")
    sign, y = y >> 255, y & (2**255 - 1)
    if y >= P:
        return None
    square = (y * y - 1) * pow(D * y * y + 1, P - 2, P) % P
    x = pow(square, (P + 3) // 8, P)
    if (x * x - square) % P:
        x = x * pow(2, (P - 1) // 4, P) % P
    if (x * x - square) % P or (x == 0 and sign):
        return None
    if x & 1 != sign:
        x = P - x
    return (x, y, 1, x * y % P)


def _add(one: Point, two: Point) -> Point:
    a = (one[1] - one[0]) * (two[1] - two[0]) % P
    b = (one[1] + one[0]) * (two[1] + two[0]) % P
    c, d = 2 * one[3] * two[3] * D % P, 2 * one[2] * two[2] % P
    e, f, g, h = b - a, d - c, d + c, b + a
    return (e * f % P, g * h % P, f * g % P, e * h % P)


def _times(factor: int, point: Point) -> Point:
    total = (0, 1, 1, 0)
    while factor:
        if factor & 1:
            total = _add(total, point)
        point, factor = _add(point, point), factor >> 1
    return total


_BASE = _point((4 * pow(5, P - 2, P) % P).to_bytes(32, "little")) or (0, 0, 0, 0)


def ed25519_verifies(public: bytes, signature: bytes, message: bytes) -> bool:
    """True when the 64-byte signature is the key's over the message."""
    if len(public) != 32 or len(signature) != 64:
        return False
    key, r = _point(public), _point(signature[:32])
    s = int.from_bytes(signature[32:], "little")
    if key is None or r is None or s >= ORDER:
        return False
    h = int.from_bytes(hashlib.sha512(signature[:32] + public + message).digest(), "little") % ORDER
    left, right = _times(s, _BASE), _add(r, _times(h, key))
    return (left[0] * right[2] - right[0] * left[2]) % P == 0 and (
        left[1] * right[2] - right[1] * left[2]
    ) % P == 0


# --- The RFC 6962 tree ----------------------------------------------------------------------------------------------


class Bad(Exception):  # noqa: N818 - read by people who are not of this project
    """Something does not hold."""


def need(condition: object, problem: str) -> None:
    """Raise `Bad` unless the condition holds."""
    if not condition:
        raise Bad(problem)


def node_hash(left: bytes, right: bytes) -> bytes:
    """The hash of a node."""
    return hashlib.sha256(b"\1" + left + right).digest()


def leaf_hash(leaf: bytes) -> bytes:
    """The hash of a leaf."""
    return hashlib.sha256(b"\0" + leaf).digest()


class Tree:
    """A tree that grows: `peaks` are the roots of its complete subtrees, the largest first."""

    def __init__(self, size: int = 0, peaks: Sequence[bytes] = ()) -> None:
        self.size, self.peaks = size, list(peaks)

    def root(self) -> bytes:
        """The tree hash of RFC 6962."""
        if not self.peaks:
            return hashlib.sha256().digest()
        root = self.peaks[-1]
        for left in reversed(self.peaks[:-1]):
            root = node_hash(left, root)
        return root

    def add(self, leaf: bytes) -> None:
        """Append a leaf."""
        node, index = leaf_hash(leaf), self.size
        while index & 1:
            node, index = node_hash(self.peaks.pop(), node), index >> 1
        self.peaks.append(node)
        self.size += 1


def root_of_inclusion(leaf: bytes, index: int, size: int, path: Sequence[bytes]) -> bytes:
    """The root that an inclusion path leads to (RFC 9162, 2.1.3.2)."""
    need(0 <= index < size, "an inclusion proof is about a leaf outside its tree")
    node, last, root = index, size - 1, leaf
    for sibling in path:
        need(last, "an inclusion path is too long")
        if node & 1 or node == last:
            root = node_hash(sibling, root)
            while node and not node & 1:
                node, last = node >> 1, last >> 1
        else:
            root = node_hash(root, sibling)
        node, last = node >> 1, last >> 1
    need(last == 0, "an inclusion path is too short")
    return root


def check_consistency(old_size: int, old_root: bytes, size: int, root: bytes, path: Sequence[bytes]) -> None:
    """Raise `Bad` unless the tree of `size` extends that of `old_size` (RFC 9162, 2.1.4.2)."""
    need(0 <= old_size <= size, f"a tree of {size} leaves does not extend one of {old_size}")
    if old_size in (0, size):
        same = old_root == (root if old_size else hashlib.sha256().digest())
        need(not path and same, f"the leaves up to {old_size} do not give the signed root")
        return
    hashes = ([old_root] if old_size & (old_size - 1) == 0 else []) + list(path)
    need(hashes, "a consistency path is empty")
    node, last = old_size - 1, size - 1
    while node & 1:
        node, last = node >> 1, last >> 1
    first = second = hashes[0]
    for sibling in hashes[1:]:
        need(last, "a consistency path is too long")
        if node & 1 or node == last:
            first, second = node_hash(sibling, first), node_hash(sibling, second)
            while node and not node & 1:
                node, last = node >> 1, last >> 1
        else:
            second = node_hash(second, sibling)
        node, last = node >> 1, last >> 1
    need(last == 0, "a consistency path is too short")
    need(first == old_root, f"the leaves up to {old_size} are not those of the signed log")
    need(second == root, f"the log of {size} leaves is not the signed one")


# --- Signed notes, keys and proofs (c2sp.org/signed-note, tlog-checkpoint, tlog-proof) ------------------------------


def unbase64(text: str, what: str) -> bytes:
    """Bytes from the one canonical base64 text."""
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:
        data = b""
    need(base64.b64encode(data).decode() == text, f"the base64 of a {what} is malformed")
    return data


def parse_key(text: str) -> Key:
    """(name, key id, type, public key) from `name+id+base64`."""
    parts = text.strip().split("+", 2)
    need(len(parts) == 3, "a key is not `name+id+base64`")
    data = unbase64(parts[2], "key")
    need(data[:1] != b"\6", "this program cannot check ML-DSA-44 signatures; use `kvcustody audit verify`")
    need(data[:1] in (b"\1", b"\4") and len(data) == 33, "this program knows Ed25519 keys alone")
    identity = hashlib.sha256(parts[0].encode() + b"\n" + data).digest()[:4]
    need(identity.hex() == parts[1], f"key `{parts[0]}` does not have the id `{parts[1]}`")
    return parts[0], identity, data[0], data[1:]


def number(text: str, what: str) -> int:
    """A decimal number in its one spelling."""
    need(
        text.isascii() and text.isdigit() and len(text) < 20 and str(int(text)) == text,
        f"{what} is no number",
    )
    return int(text)


def split_note(note: bytes) -> tuple[str, list[tuple[str, bytes, bytes]]]:
    """(text, [(name, key id, signature)]) of a note."""
    need(len(note) <= 1 << 18, "a note is too long")
    text, found, lines = note.decode().rpartition("\n\n")
    need(found and lines.endswith("\n"), "a note has no signature lines")
    signatures = []
    for line in lines[:-1].split("\n"):
        parts = line.split(" ")
        need(len(parts) == 3 and parts[0] == "—", "a signature line is malformed")
        data = unbase64(parts[2], "signature")
        signatures.append((parts[1], data[:4], data[4:]))
    return text + "\n", signatures


def signed_by(key: Key, text: str, signatures: list[tuple[str, bytes, bytes]]) -> int | None:
    """The time (0 for a log's own key) at which the key signed the text; None where it did not."""
    name, identity, kind, public = key
    for line_name, line_identity, data in signatures:
        if (line_name, line_identity) != (name, identity):
            continue
        if kind == 1:
            message, at_seconds, signature = text.encode(), 0, data
        else:
            at_seconds, signature = int.from_bytes(data[:8], "big"), data[8:]
            message = f"cosignature/v1\ntime {at_seconds}\n{text}".encode()
        need(ed25519_verifies(public, signature, message), f"a signature of `{name}` does not verify")
        return at_seconds
    return None


def parse_checkpoint(text: str) -> tuple[str, int, bytes]:
    """(origin, size, root) of a checkpoint."""
    lines = text.split("\n")
    need(len(lines) >= 4 and lines[-1] == "" and all(lines[:-1]), "a checkpoint is malformed")
    root = unbase64(lines[2], "root")
    need(len(root) == 32, "a root is not 32 bytes long")
    return lines[0], number(lines[1], "the size of a checkpoint"), root


def parse_opening(data: bytes) -> tuple[str, int, bytes, bytes]:
    """(name, size, root, root leaf) of what opens a leaf of the root log."""
    need(72 < len(data) <= 72 + 1024, "an opening is malformed")
    leaf = hmac.digest(data[:32], b"kvcustody/sub-log-head@1\0" + data[32:], "sha256")
    return data[72:].decode(), int.from_bytes(data[32:40], "big"), data[40:72], leaf


def check_head(data: bytes, checkpoint: tuple[str, int, bytes], note: bytes) -> tuple[str, int, bytes]:
    """(name, size, root) of a sub-log, from a proof that the checkpoint covers it."""
    head, found, rest = data.partition(b"\n\n")
    lines = head.decode("ascii").split("\n")
    need(found and lines[0] == "c2sp.org/tlog-proof@v1" and len(lines) >= 3, "a head's proof is malformed")
    need(lines[1].startswith("extra ") and lines[2].startswith("index "), "a head's proof is malformed")
    need(
        note.startswith(rest), "a head's proof is under another checkpoint"
    )  # lines of witnesses may have come after
    name, size, root, leaf = parse_opening(unbase64(lines[1][6:], "opening"))
    path = [unbase64(line, "path") for line in lines[3:]]
    reached = root_of_inclusion(leaf_hash(leaf), number(lines[2][6:], "an index"), checkpoint[1], path)
    need(reached == checkpoint[2], f"the head of `{name}` is not under the signed checkpoint")
    return name, size, root


def check_leaf(
    leaf: bytes, data: bytes, checkpoint: tuple[str, int, bytes], note: bytes
) -> tuple[str, int, int]:
    """(log, place, size) of a leaf, from a proof that the checkpoint covers it."""
    proof, _, rest = data.partition(b"\n\n")
    lines = proof.decode("ascii").split("\n")
    need(lines[0] == "kvcustody/leaf-proof@1" and len(lines) >= 2, "the proof of a leaf is malformed")
    need(lines[1].startswith("index "), "the proof of a leaf is malformed")
    name, size, root = check_head(rest, checkpoint, note)
    place, path = number(lines[1][6:], "an index"), [unbase64(line, "path") for line in lines[2:]]
    need(
        root_of_inclusion(leaf_hash(leaf), place, size, path) == root, f"the leaf is not in the log `{name}`"
    )
    return name, place, size


def check_mailed(proof: Path, key: str, witnesses: Sequence[str]) -> str:
    """Check NAME.leaf by NAME.proof; returns what is sound, raises `Bad`."""
    data = proof.read_bytes()
    note = b"\n\n".join(data.split(b"\n\n")[2:])
    text, signatures = split_note(note)
    checkpoint = parse_checkpoint(text)
    for one, what in ((key, "the key"), *((witness, "a witness") for witness in witnesses)):
        need(
            signed_by(parse_key(one), text, signatures) is not None, f"the checkpoint is not signed by {what}"
        )
    need(parse_key(key)[0] == checkpoint[0], f"the checkpoint is of `{checkpoint[0]}`")
    name, place, size = check_leaf(proof.with_suffix(".leaf").read_bytes(), data, checkpoint, note)
    return f"leaf {place} of `{name}` ({size} leaves), under a checkpoint of {checkpoint[1]} of `{checkpoint[0]}`"


# --- Handovers of the signing key, and timestamps --------------------------------------------------------------------


def parse_handover(note: bytes) -> tuple[Key, Key, int, bytes]:
    """(old key, new key, size, root): from the tree of that head on, the new key signs. Both must have signed this."""
    text, signatures = split_note(note)
    lines = text.split("\n")
    fields = [line.partition(" ") for line in lines[1:-1]]
    names = ["from", "to", "size", "root", "time"]
    right = lines[0] == "kvcustody/key-rotation@1" and [field[0] for field in fields] == names
    need(right and len(signatures) == 2, "a handover of the signing key is malformed")
    old, new = parse_key(fields[0][2]), parse_key(fields[1][2])
    need(old[0] == new[0] and old != new, "a handover is not of one log and two keys")
    for key, signature in zip((old, new), signatures, strict=True):
        need(
            signed_by(key, text, [signature]) is not None,
            f"a handover is not signed by both keys of `{key[0]}`",
        )
    return old, new, number(fields[2][2], "the size of a handover"), unbase64(fields[3][2], "root")


def signer(
    folder: Path, manifest: dict[str, Any], trusted: Key, checkpoint: tuple[str, int, bytes], note: bytes
) -> tuple[Key, int]:
    """The key that may have signed the checkpoint, beginning at the one you trust; and how many handovers there are."""
    key, found = trusted, False
    entries = manifest.get("handovers", [])
    for entry in entries:
        leaf = inside(folder, entry["place"] + ".leaf").read_bytes()
        proof = inside(folder, entry["place"] + ".tlog-proof").read_bytes()
        name = check_leaf(leaf, proof, checkpoint, note)[0]
        need(name == "system", "a handover of the signing key is not in the system log")
        body = json.loads(leaf)
        need(body["kind"] == "signing-key", "the leaf of a handover is another")
        old, new, past, head = parse_handover(base64.b64decode(body["record"]))
        path = [unbase64(text, "path") for text in entry["consistency"]]
        check_consistency(past, head, checkpoint[1], checkpoint[2], path)
        found = found or old == trusted
        if found and past < checkpoint[1]:
            need(old == key, "a handover does not continue the chain of keys")
            key = new
    return key, len(entries)


def stamped(folder: Path, manifest: dict[str, Any], checkpoint: tuple[str, int, bytes]) -> list[str]:
    """The timestamps that speak of this checkpoint or of the beginning of it; their tokens are not checked here."""
    places = []
    for entry in manifest.get("timestamps", []):
        origin, size, root = parse_checkpoint(inside(folder, entry["place"] + ".txt").read_text())
        need(origin == checkpoint[0], "a timestamp is of another ledger")
        path = [unbase64(text, "path") for text in entry["consistency"]]
        check_consistency(size, root, checkpoint[1], checkpoint[2], path)
        places.append(entry["place"])
    return places


# --- The export -----------------------------------------------------------------------------------------------------


def read_leaves(path: Path, form: str) -> Iterator[bytes]:
    """Every leaf in a file of the export."""
    if form == "ndjson":
        with path.open("rb") as file:
            for line in file:
                need(line.endswith(b"\n"), f"`{path.name}` is cut off")
                yield line[:-1]
    elif form == "csv":
        csv.field_size_limit(1 << 20)
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.reader(file, strict=True)
            next(rows, None)
            for row in rows:
                need(row, f"`{path.name}` has an empty row")
                yield row[-1].encode()
    else:
        raise LookupError(f"files of `{form}` are checked by `kvcustody audit verify`")


def inside(folder: Path, path: str) -> Path:
    """A path of the manifest, refused where it leads out of the export."""
    need(not path.startswith("/") and ".." not in path.split("/"), f"`{path}` is outside the export")
    found = folder / path
    need(found.is_file() and not found.is_symlink(), f"`{path}` is missing")
    return found


def check_files(folder: Path, manifest: dict[str, Any]) -> None:
    """The folder holds the files of the manifest, each named once, this program, and nothing else."""
    names = ["checkpoint", "manifest.json", "verify_kvcustody.py"] + ["root.ndjson"] * bool(
        manifest["openings"]
    )
    for entry in manifest["logs"]:
        names += [entry["folder"] + "/head.tlog-proof", *(file["path"] for file in entry["files"])]
    for entry in manifest.get("handovers", []):
        names += [entry["place"] + ".leaf", entry["place"] + ".tlog-proof"]
    for entry in manifest.get("timestamps", []):
        names += [entry["place"] + ".txt", entry["place"] + ".tsr"]
    need(len(set(names)) == len(names), "the manifest names a file twice")
    wanted = set(names)
    parents = {
        "/".join(parts[:end]) for parts in (name.split("/") for name in names) for end in range(len(parts))
    }
    waiting = [""]
    while waiting:
        at = waiting.pop()
        for path in sorted((folder / at).iterdir()):
            name = f"{at}/{path.name}" if at else path.name
            if path.is_dir() and not path.is_symlink() and name in parents:
                waiting.append(name)
            else:
                plain = path.is_file() and not path.is_symlink()
                need(plain and name in wanted, f"`{name}` is no part of the export")


def check_log(
    folder: Path,
    entry: dict[str, Any],
    form: str,
    checkpoint: tuple[str, int, bytes],
    note: bytes,
    heads: Heads | None,
    kept: Sequence[Kept],
) -> dict[str, Any]:
    """Check one sub-log; returns what was found. `heads` are those that the root log says it had (or None)."""
    name, size, root = check_head(
        inside(folder, entry["folder"] + "/head.tlog-proof").read_bytes(), checkpoint, note
    )
    need(name == entry["name"], f"`{entry['folder']}` is log `{name}`, not `{entry['name']}`")
    span = entry["range"]
    before = unbase64(span["before"], "frontier")
    first, end = int.from_bytes(before[:8], "big"), span["end"]
    tree = Tree(first, [before[at : at + 32] for at in range(40, len(before), 32)])
    need(
        len(tree.peaks) == bin(first).count("1") and first == span["first"],
        f"the range of `{name}` is malformed",
    )
    found: dict[str, Any] = {"name": name, "size": size, "first": first, "end": end, "kinds": {}, "times": []}
    found["handovers"], found["lives"] = 0, []
    wanted = dict((heads or {}).get(name, {}))
    wanted.update({head[0]: head[1] for head in kept if head[2] == name})
    past = [at for at in wanted if at < first]
    for file in entry["files"]:
        check_file(inside(folder, file["path"]), file, form, tree, wanted, found)
    if tree.size in wanted:
        need(tree.root() == wanted[tree.size], f"`{name}` had another history at {tree.size} leaves")
    need(tree.size == end, f"`{name}` has {tree.size - first} leaves in its files, not {end - first}")
    need(
        heads is None or end == size,
        f"`{name}` ends at leaf {end} of {size} in what should be a whole export",
    )
    path = [unbase64(text, "path") for text in span["path"]]
    check_consistency(tree.size, tree.root(), size, root, path)
    beyond = [at for at in wanted if at > end]
    need(not heads or not beyond, f"the root log has a head of `{name}` past what was exported")
    need(
        not [at for at in beyond if at > size], f"`{name}` was cut: it had more leaves when its head was kept"
    )
    found["unchecked_heads"] = len(past) + len(beyond)
    return found


def check_file(
    path: Path,
    file: dict[str, Any],
    form: str,
    tree: Tree,
    wanted: dict[int, bytes],
    found: dict[str, Any],
) -> None:
    """Take the leaves of one file into the tree."""
    name = found["name"]
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    problem = f"`{file['path']}` is not the file that the manifest names"
    if tree.size != file["first"]:
        raise Bad(f"`{file['path']}` begins at leaf {file['first']}, and leaf {tree.size} was expected")
    for leaf in read_leaves(path, form):
        if tree.size in wanted:
            need(tree.root() == wanted[tree.size], f"`{name}` had another history at {tree.size} leaves")
        try:
            body = json.loads(leaf)
            kind, moment = body["kind"], body["at_us"]
            found["handovers"] += kind == "signing-key" and body["record"] != ""
            if name == "system" and kind in ("worker-started", "worker-stopped", "worker-died"):
                found["lives"].append(body)
            need(body["log"] == name, f"leaf {tree.size} of `{name}` says that it belongs to `{body['log']}`")
        except (ValueError, KeyError, TypeError):
            raise Bad(f"leaf {tree.size} of `{name}` is not a leaf") from None
        found["kinds"][kind] = found["kinds"].get(kind, 0) + 1
        times = found["times"]
        found["times"] = [min(times[0], moment), max(times[1], moment)] if times else [moment, moment]
        tree.add(leaf)
    need(digest == file["sha256"] and path.stat().st_size == file["bytes"], problem)
    need(tree.size - file["first"] == file["leaves"], problem)


def check_root_log(path: Path, checkpoint: tuple[str, int, bytes]) -> tuple[Heads, int]:
    """The heads of every sub-log as the root log has them: {name: {size: root}}, and how many leaves stay closed."""
    tree, closed = Tree(), 0
    heads: Heads = {}
    with path.open("rb") as file:
        for line in file:
            value = json.loads(line)
            leaf = bytes.fromhex(value["leaf"])
            canonical = json.dumps(value, separators=(",", ":")) + "\n"
            need(line.decode() == canonical.lower(), "root.ndjson is not in its one form")
            if value["opening"] is None:
                closed += 1
            else:
                name, size, root, commitment = parse_opening(bytes.fromhex(value["opening"]))
                need(commitment == leaf, f"leaf {tree.size} of the root log is not what its opening says")
                known = heads.setdefault(name, {}).setdefault(size, root)
                need(known == root, f"`{name}` has two histories: two heads at {size} leaves")
            tree.add(leaf)
    need(tree.size == checkpoint[1] and tree.root() == checkpoint[2], "the root log is not the signed one")
    return heads, closed


def check_export(
    folder: Path, key: str, witnesses: Sequence[str] = (), kept: Sequence[Kept] = ()
) -> dict[str, Any]:
    """Check everything; returns what was found, raises `Bad` with the first thing that is wrong."""
    note = inside(folder, "checkpoint").read_bytes()
    text, signatures = split_note(note)
    checkpoint = parse_checkpoint(text)
    trusted = parse_key(key)
    need(
        trusted[0] == checkpoint[0], f"the checkpoint is of `{checkpoint[0]}`, and the key of `{trusted[0]}`"
    )
    manifest = json.loads(inside(folder, "manifest.json").read_bytes())
    need(manifest["schema"] == "kvcustody/export@1", "the manifest is of another schema")
    key_now, handovers = signer(folder, manifest, trusted, checkpoint, note)
    need(signed_by(key_now, text, signatures) is not None, "the checkpoint is not signed by the key")
    stated = {"size": checkpoint[1], "root": base64.b64encode(checkpoint[2]).decode()}
    same = (manifest["origin"], manifest["root"]) == (checkpoint[0], stated)
    need(same, "the manifest is of another checkpoint")
    check_files(folder, manifest)
    seen: dict[str, int | None] = {}
    for witness in map(parse_key, witnesses):
        seen[witness[0]] = signed_by(witness, text, signatures)
        need(seen[witness[0]] is not None, f"witness `{witness[0]}` did not sign the checkpoint")
    heads, closed = None, 0
    if manifest["openings"]:
        heads, closed = check_root_log(inside(folder, "root.ndjson"), checkpoint)
        missing = sorted(set(heads) - {entry["name"] for entry in manifest["logs"]})
        need(not missing, f"sub-log `{missing[0] if missing else ''}` was left out")
    form = manifest["format"]
    logs = [check_log(folder, entry, form, checkpoint, note, heads, kept) for entry in manifest["logs"]]
    need(len({log["name"] for log in logs}) == len(logs), "a sub-log is listed twice")
    need(
        heads is None or sum(log["handovers"] for log in logs) == handovers,
        "the system log has other handovers of the signing key than the export lists",
    )
    for head in kept:
        need(
            head[2] in {log["name"] for log in logs}, f"the log `{head[2]}`, whose head you kept, is not here"
        )
    return {"origin": checkpoint[0], "size": checkpoint[1], "logs": logs, "witnesses": seen, "closed": closed,
            "whole": bool(manifest["openings"]), "handovers": handovers,
            "stamps": stamped(folder, manifest, checkpoint), **check_marked(manifest, logs)}  # fmt: skip


def marked_of(lives: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The processes that replayed or generated what they recorded, from the leaves about processes' lives."""
    ended: dict[str, int] = {}
    starts: dict[str, dict[str, Any]] = {}
    for body in lives:
        life = body.get("of_incarnation") or body["incarnation"]
        if body["kind"] != "worker-started":
            ended[life] = max(ended.get(life, 0), int(body["at_us"]))
        elif body.get("origin"):
            starts.setdefault(life, body)
    made = [{"incarnation": life, "worker": body["worker"], "origin": body["origin"] if
             body["origin"] in ("generated", "replayed") else "of unknown origin", "started_us": int(body["at_us"]),
             "ended_us": ended.get(life)} for life, body in starts.items()]  # fmt: skip
    return sorted(made, key=lambda one: (one["started_us"], one["incarnation"]))


def check_marked(manifest: dict[str, Any], logs: list[dict[str, Any]]) -> dict[str, Any]:
    """Which processes are marked: as the leaves say where all of the system log is here, else as the manifest says."""
    whole = [
        log for log in logs if log["name"] == "system" and (log["first"], log["end"]) == (0, log["size"])
    ]
    stated = manifest.get("marked", [])
    if not whole:
        return {"marked": stated, "marked_shown": False}
    found = marked_of(whole[0]["lives"])
    need(
        found == stated,
        "the manifest calls other processes replayed or generated than the leaves of their starts",
    )
    return {"marked": found, "marked_shown": True}


def key_text(given: str) -> str:
    """A key as it was given, or the first line of the file that was named; `#` begins a comment."""
    if not Path(given).is_file():
        return given
    lines = [line.strip() for line in Path(given).read_text().splitlines()]
    return next((line for line in lines if line and not line.startswith("#")), "")


def parse_kept(text: str) -> Kept:
    """A head that was kept: `LOG SIZE ROOT` as (size, root, log)."""
    parts = text.rsplit(" ", 2)
    need(len(parts) == 3, "--head is `LOG SIZE BASE64-ROOT`")
    return number(parts[1], "the size of a kept head"), unbase64(parts[2], "root"), parts[0]


def limits(found: dict[str, Any]) -> list[str]:
    """What the verdict does not cover."""
    says = ["That everything that happened was recorded: see conservation and coverage in the ledger's own reports.",
            "That what was recorded is true: a leaf proves what was written, not that it is so."]  # fmt: skip
    if not found["witnesses"]:
        says.append("Split views and cut tails: no witness was checked (--witness), so whoever kept no earlier head "
                    "cannot know that others were shown the same log, or that it was not longer.")  # fmt: skip
    says.append("When this existed. To ask a timestamp authority that you trust, for each of "
                f"{', '.join(found['stamps'])}: openssl ts -verify -data PLACE.txt -in PLACE.tsr "
                "-CAfile roots.pem -untrusted tsa.pem" if found["stamps"] else
                "When this existed: no timestamp came along.")  # fmt: skip
    if not found["marked_shown"]:
        says.append(
            "Which processes replayed or generated what they recorded: not all of the system log is here."
        )
    if not found["whole"]:
        says.append(
            "That no other sub-log exists, and that these heads are the newest: this export is of some logs or times."
        )
    if found["closed"]:
        says.append(f"What {found['closed']} leaves of the root log stand for: their salts were destroyed.")
    bare = [log for log in found["logs"] if found["whole"] and log["first"]]
    says += [
        f"What leaves 0 to {log['first']} of {log['name']} said: only their hashes are there." for log in bare
    ]
    unchecked = sum(log["unchecked_heads"] for log in found["logs"])
    if unchecked:
        says.append(f"{unchecked} earlier heads whose leaves are not in this export.")
    return says


def main() -> int:
    """Run the checks and say what they show."""
    parser = argparse.ArgumentParser(description="Check an export of a kvcustody ledger.")
    parser.add_argument("export", type=Path)
    parser.add_argument("--key", required=True, help="the ledger's public key, or a file that holds it")
    parser.add_argument(
        "--witness", action="append", default=[], help="a witness's key that must have signed"
    )
    parser.add_argument(
        "--head", action="append", default=[], metavar="'LOG SIZE ROOT'", help="a head you kept"
    )
    asked = parser.parse_args()
    texts = [key_text(text) for text in (asked.key, *asked.witness)]
    try:
        if asked.export.suffix == ".proof" and asked.export.is_file():
            need(not asked.head, "--head is for exports; this is the proof of one leaf")
            print(f"SOUND: {check_mailed(asked.export, texts[0], texts[1:])}")
            print(
                "Not shown:\n  - What else the log holds, and that its head is the newest: this is one leaf.\n"
                "  - Whether its process was an engine at work: the leaf of its start (`origin`) says so."
            )
            return 0
        found = check_export(asked.export, texts[0], texts[1:], [parse_kept(text) for text in asked.head])
    except Bad as problem:
        print(f"NOT SOUND: {problem}")
        return 1
    except (OSError, LookupError, ValueError, TypeError, csv.Error) as problem:
        print(f"CANNOT BE CHECKED: {type(problem).__name__}: {problem}")
        return 2
    for log in found["logs"]:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(log["kinds"].items()))
        print(
            f"{log['name']}: leaves {log['first']} to {log['end']} of {log['size']} are as signed ({kinds})"
        )
    print(f"SOUND: {sum(log['end'] - log['first'] for log in found['logs'])} leaves of `{found['origin']}`, "
          f"checkpoint of {found['size']}")  # fmt: skip
    for one in found["marked"]:
        print(f"NOT AN ENGINE AT WORK: all that process {one['incarnation']} of {one['worker']!a} recorded is "
              f"{one['origin']}")  # fmt: skip
    if found["handovers"]:
        print(f"{found['handovers']} handovers of the signing key are on record")
    for name, at_seconds in found["witnesses"].items():
        print(f"witness `{name}` signed at {at_seconds} (POSIX seconds)")
    print("Not shown:")
    for line in limits(found):
        print(f"  - {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
