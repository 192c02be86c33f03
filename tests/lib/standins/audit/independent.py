"""A second verifier, written from RFC 8032, RFC 6962 and the C2SP pages alone: the oracle of what we write and accept.

It shares no code with the product and needs only the standard library: Ed25519 is computed here from its definition,
and trees by the recursive definitions of RFC 6962. `fsck_tiles` is what Tessera's fsck does with a log's files;
`fsck_export` reads an export of leaves. A verdict of the product that this one does not share is a bug of one of them.
"""

from __future__ import annotations

import base64
import csv
import functools
import hashlib
import hmac
import json
from pathlib import Path
from typing import Any

# -- Ed25519 by RFC 8032 §5.1.4, a point as (X, Y, Z, T) with x = X/Z, y = Y/Z, xy = T/Z -------------------------------

P = 2**255 - 19
ORDER = 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, -1, P) % P
Point = tuple[int, int, int, int]


def add(p: Point, q: Point) -> Point:
    a, b = (p[1] - p[0]) * (q[1] - q[0]) % P, (p[1] + p[0]) * (q[1] + q[0]) % P
    c, d = 2 * p[3] * q[3] * D % P, 2 * p[2] * q[2] % P
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % P, g * h % P, f * g % P, e * h % P


def multiply(factor: int, point: Point) -> Point:
    total: Point = (0, 1, 1, 0)
    while factor:
        if factor & 1:
            total = add(total, point)
        point, factor = add(point, point), factor >> 1
    return total


def decode_point(data: bytes) -> Point | None:
    y = int.from_bytes(data, "little")
    sign, y = y >> 255, y & (2**255 - 1)
    if y >= P:
        return None
    square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
    x = pow(square, (P + 3) // 8, P)
    if (x * x - square) % P:
        x = x * pow(2, (P - 1) // 4, P) % P
    if (x * x - square) % P or (x == 0 and sign):
        return None
    x = P - x if x & 1 != sign else x
    return x, y, 1, x * y % P


@functools.cache
def ed25519(public: bytes, message: bytes, signature: bytes) -> bool:
    base = decode_point((4 * pow(5, -1, P) % P).to_bytes(32, "little"))
    key, point = decode_point(public), decode_point(signature[:32])
    s = int.from_bytes(signature[32:], "little")
    if len(signature) != 64 or base is None or key is None or point is None or s >= ORDER:
        return False
    challenge = int.from_bytes(hashlib.sha512(signature[:32] + public + message).digest(), "little") % ORDER
    left, right = multiply(s, base), add(point, multiply(challenge, key))
    return not ((left[0] * right[2] - right[0] * left[2]) % P or (left[1] * right[2] - right[1] * left[2]) % P)


# -- the C2SP pages ----------------------------------------------------------------------------------------------------


def decode(text: str) -> bytes:
    data = base64.b64decode(text, validate=True)
    assert base64.b64encode(data).decode() == text
    return data


def value_of(line: str, word: str) -> str:
    assert line.startswith(word + " ")
    return line[len(word) + 1 :]


def number(text: str) -> int:
    assert text == str(int(text))
    return int(text)


def read_checkpoint(note: str, vkey: str) -> tuple[int, bytes] | None:
    """Size and root, where the note carries a good line by the key."""
    name, key_id, encoded = vkey.split("+", 2)
    key = decode(encoded)
    assert hashlib.sha256(name.encode() + b"\n" + key).hexdigest()[:8] == key_id
    cut = note.rindex("\n\n")
    text, lines = note[: cut + 1], note[cut + 2 :]
    assert lines.endswith("\n")
    for line in lines[:-1].split("\n"):
        dash, signer, payload = line.split(" ")
        assert dash == "\u2014"
        data = decode(payload)
        if (signer, data[:4].hex()) != (name, key_id):
            continue
        message, signature = text.encode(), data[4:]
        if key[0] == 4:
            time = int.from_bytes(data[4:12], "big")
            message, signature = f"cosignature/v1\ntime {time}\n".encode() + message, data[12:]
        if ed25519(key[1:], message, signature):
            _, size, root = text[:-1].split("\n")
            return number(size), decode(root)
    return None


def root_from_path(leaf: bytes, index: int, size: int, path: list[bytes]) -> bytes:
    """RFC 6962 §2.1.1, turned round: which side the sibling is on follows from where the split is."""
    if size == 1:
        assert not path
        return hashlib.sha256(b"\x00" + leaf).digest()
    split = 1 << (size - 1).bit_length() - 1
    if index < split:
        return hashlib.sha256(b"\x01" + root_from_path(leaf, index, split, path[:-1]) + path[-1]).digest()
    return hashlib.sha256(b"\x01" + path[-1] + root_from_path(leaf, index - split, size - split, path[:-1])).digest()


def roots_from_proof(
    old: int, size: int, proof: list[bytes], old_root: bytes, whole: bool = True
) -> tuple[bytes, bytes]:
    """RFC 6962 §2.1.2, turned round: the old root and the new one that a proof leads to."""
    if old == size:
        if whole:
            assert not proof
            return old_root, old_root
        assert len(proof) == 1
        return proof[0], proof[0]
    split = 1 << (size - 1).bit_length() - 1
    if old <= split:
        before, after = roots_from_proof(old, split, proof[:-1], old_root, whole)
        return before, hashlib.sha256(b"\x01" + after + proof[-1]).digest()
    before, after = roots_from_proof(old - split, size - split, proof[:-1], old_root, False)
    return (
        hashlib.sha256(b"\x01" + proof[-1] + before).digest(),
        hashlib.sha256(b"\x01" + proof[-1] + after).digest(),
    )


def check_leaf_file(data: bytes, leaf: bytes, vkey: str) -> str | None:
    """The sub-log that a leaf's proof places it in, by docs/reference/formats/proofs.md."""
    try:
        of_leaf, of_head, note = data.decode().split("\n\n", 2)
        kind, index, *path = of_leaf.split("\n")
        head_kind, extra, head_index, *head_path = of_head.split("\n")
        assert (kind, head_kind) == ("kvcustody/leaf-proof@1", "c2sp.org/tlog-proof@v1")
        opening = decode(value_of(extra, "extra"))
        salt, size, root, name = (
            opening[:32],
            int.from_bytes(opening[32:40], "big"),
            opening[40:72],
            opening[72:],
        )
        found = root_from_path(leaf, number(value_of(index, "index")), size, [decode(item) for item in path])
        signed = read_checkpoint(note, vkey)
        assert found == root and signed is not None
        commitment = hmac.new(salt, b"kvcustody/sub-log-head@1\0" + opening[32:], hashlib.sha256).digest()
        at = number(value_of(head_index, "index"))
        above = root_from_path(commitment, at, signed[0], [decode(item) for item in head_path])
        return name.decode() if above == signed[1] else None
    except (AssertionError, ValueError, IndexError):
        return None


# -- folders -----------------------------------------------------------------------------------------------------------


def sha256(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def tree_hash(hashes: list[bytes]) -> bytes:
    """RFC 6962 §2.1, over leaf hashes."""
    if len(hashes) < 2:
        return hashes[0] if hashes else sha256()
    split = 1 << (len(hashes) - 1).bit_length() - 1
    return sha256(b"\x01", tree_hash(hashes[:split]), tree_hash(hashes[split:]))


def files_below(folder: Path) -> set[str]:
    """Every path below a folder; anything but plain folders and files is none of ours."""
    files = set()
    for path in folder.rglob("*"):
        assert not path.is_symlink() and (path.is_dir() or path.is_file())
        assert path.is_file() or any(path.iterdir())
        if path.is_file():
            files.add(path.relative_to(folder).as_posix())
    return files


def read_head(data: bytes, vkey: str) -> tuple[str, int, bytes, str]:
    """Name, size and root of a sub-log, and the note, from its head's proof under a checkpoint that the key signed."""
    of_head, note = data.decode().split("\n\n", 1)
    kind, extra, index, *path = of_head.split("\n")
    assert kind == "c2sp.org/tlog-proof@v1"
    opening, signed = decode(value_of(extra, "extra")), read_checkpoint(note, vkey)
    assert signed is not None
    reached = root_from_path(
        commitment_of(opening), number(value_of(index, "index")), signed[0], [decode(item) for item in path]
    )
    assert reached == signed[1]
    return opening[72:].decode(), int.from_bytes(opening[32:40], "big"), opening[40:72], note


def commitment_of(opening: bytes) -> bytes:
    assert len(opening) > 72
    return hmac.new(opening[:32], b"kvcustody/sub-log-head@1\0" + opening[32:], hashlib.sha256).digest()


def tile_file(level: int | str, index: int, width: int) -> str:
    digits = f"{index:0{-(-len(str(index)) // 3) * 3}d}"
    groups = [digits[at : at + 3] for at in range(0, len(digits), 3)]
    place = "/".join([*(f"x{group}" for group in groups[:-1]), groups[-1]])
    return f"tile/{level}/{place}" + ("" if width == 256 else f".p/{width}")


def fsck_tiles(folder: Path, vkey: str) -> bool:
    """Whether a folder of tiles is exactly the log that the key signed: its head, every bundle, every tile."""
    try:
        _fsck_tiles(folder, vkey)
    except (AssertionError, ValueError, LookupError, OSError):
        return False
    return True


def _fsck_tiles(folder: Path, vkey: str) -> None:
    head = "checkpoint" if (folder / "checkpoint").exists() else "head.tlog-proof"
    if head == "checkpoint":
        signed = read_checkpoint((folder / head).read_text(), vkey)
        assert signed is not None
        size, root = signed
    else:
        _, size, root, _ = read_head((folder / head).read_bytes(), vkey)
    files = {head}
    hashes: list[bytes] = []
    for index, width in widths(size):
        files.add(path := tile_file("entries", index, width))
        data, count = (folder / path).read_bytes(), 0
        while data:
            length = int.from_bytes(data[:2], "big")
            assert len(data) >= 2 + length
            hashes.append(sha256(b"\x00", data[2 : 2 + length]))
            data, count = data[2 + length :], count + 1
        assert count == width
    assert tree_hash(hashes) == root
    level, row = 0, hashes
    while row:
        for index, width in widths(len(row)):
            files.add(path := tile_file(level, index, width))
            assert (folder / path).read_bytes() == b"".join(row[256 * index :][:width])
        row = [tree_hash(row[at : at + 256]) for at in range(0, len(row) - 255, 256)]
        level += 1
    assert files_below(folder) == files


def widths(size: int) -> list[tuple[int, int]]:
    """(index, width) of the tiles of a row."""
    return [(at // 256, min(256, size - at)) for at in range(0, size, 256)]


def fsck_export(folder: Path, vkey: str) -> bool:
    """Whether an export of whole logs, text files and no handovers, is exactly what the key signed."""
    try:
        _fsck_export(folder, vkey)
    except (AssertionError, ValueError, LookupError, OSError, TypeError, csv.Error):
        return False
    return True


def _fsck_export(folder: Path, vkey: str) -> None:
    manifest = json.loads((folder / "manifest.json").read_bytes())
    note = (folder / "checkpoint").read_text()
    signed = read_checkpoint(note, vkey)
    assert signed is not None and signed[0] == manifest["root"]["size"]
    assert note.split("\n")[0] == manifest["origin"] == vkey.split("+", maxsplit=1)[0]
    files = ["manifest.json", "checkpoint", "verify_kvcustody.py"]
    heads: dict[str, dict[int, bytes]] = {}
    if manifest["openings"]:
        files.append("root.ndjson")
        heads = _read_root_log((folder / "root.ndjson").read_bytes(), signed)
        assert set(heads) == {log["name"] for log in manifest["logs"]}
    for log in manifest["logs"]:
        files += [log["folder"] + "/head.tlog-proof", *(file["path"] for file in log["files"])]
        name, size, root, under = read_head((folder / files[-1 - len(log["files"])]).read_bytes(), vkey)
        assert name == log["name"] and under.split("\n\n")[0] == note.split("\n\n")[0]
        leaves: list[bytes] = []
        for file in log["files"]:
            data = (folder / file["path"]).read_bytes()
            some = _read_leaves(data, manifest["format"])
            stated = (file["first"], file["leaves"], file["bytes"], file["sha256"])
            assert stated == (len(leaves), len(some), len(data), hashlib.sha256(data).hexdigest())
            leaves += some
        assert all(json.loads(leaf)["log"] == name for leaf in leaves)
        hashes = [sha256(b"\x00", leaf) for leaf in leaves]
        for at, known in [(size, root), *heads.get(name, {}).items()]:
            assert at <= len(hashes) == size and tree_hash(hashes[:at]) == known
    assert len(set(files)) == len(files) and files_below(folder) == set(files)


def _read_root_log(data: bytes, signed: tuple[int, bytes]) -> dict[str, dict[int, bytes]]:
    heads: dict[str, dict[int, bytes]] = {}
    hashes = []
    assert data.endswith(b"\n") and data == data.lower()
    for line in data[:-1].split(b"\n"):
        value: dict[str, Any] = json.loads(line)
        leaf, opening = bytes.fromhex(value["leaf"]), bytes.fromhex(value["opening"])
        assert commitment_of(opening) == leaf and json.dumps(value, separators=(",", ":")).encode() == line
        size = int.from_bytes(opening[32:40], "big")
        assert heads.setdefault(opening[72:].decode(), {}).setdefault(size, opening[40:72]) == opening[40:72]
        hashes.append(sha256(b"\x00", leaf))
    assert (len(hashes), tree_hash(hashes)) == signed
    return heads


def _read_leaves(data: bytes, form: str) -> list[bytes]:
    if form == "ndjson":
        assert data.endswith(b"\n") or not data
        return data.split(b"\n")[:-1]
    rows = list(csv.reader(data.decode().splitlines(), strict=True))
    return [row[-1].encode() for row in rows[1:]]
