"""Exports as C2SP tiles: paths, bundles, hostile folders, and the root log over sub-logs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcustody.audit.leaf.merkle import EMPTY_ROOT, Frontier, TreeError, TreeHead, leaf_hash, leaf_hashes
from kvcustody.audit.tlog.checkpoint import Checkpoint
from kvcustody.audit.tlog.key_rotation import parse_rotation, rotation_record
from kvcustody.audit.tlog.proofs import (
    MemoryTiles,
    ProofError,
    check_consistency,
    check_inclusion,
    consistency_proof,
    inclusion_proof,
)
from kvcustody.audit.tlog.root_log import (
    HeadProof,
    LeafProof,
    RootLeafOpening,
    check_head,
    check_leaf,
    parse_head_proof,
    parse_leaf_proof,
    root_checkpoint,
    seal,
)
from kvcustody.audit.tlog.signed_note import KeyKind, NoteError, parse_vkey
from kvcustody.audit.tlog.signing_key import SigningKey, sign_checkpoint
from kvcustody.audit.tlog.tiles import (
    CHECKPOINT,
    ENTRIES,
    HEAD_PROOF,
    ExportError,
    TileFolder,
    decode_bundle,
    encode_bundle,
    tile_path,
    tile_paths,
    write_export,
)
from kvcustody.audit.verify.verify_tiles import verify_export
from kvcustody.errors import LedgerError

LOG = SigningKey.from_seed("ledger.example/root", KeyKind.ED25519, bytes(range(32)))
VKEY = str(LOG.verifier)


def some(count: int) -> list[bytes]:
    return [b'{"sequence":%d}' % number for number in range(count)]


def export(folder: Path, leaves: list[bytes], *, durable: bool = False) -> Path:
    head = MemoryTiles(leaf_hashes(leaves)).frontier.head()
    note = sign_checkpoint(root_checkpoint(LOG.name, head), [LOG])
    write_export(folder, leaves, head, {CHECKPOINT: note}, durable=durable)
    return folder


@pytest.mark.parametrize(
    ("level", "index", "width", "path"),
    [
        (0, 0, 256, "tile/0/000"),
        (0, 7, 1, "tile/0/007.p/1"),
        (1, 999, 255, "tile/1/999.p/255"),
        (2, 1000, 256, "tile/2/x001/000"),
        (0, 1234067, 256, "tile/0/x001/x234/067"),
        (ENTRIES, 1234067, 112, "tile/entries/x001/x234/067.p/112"),
        (63, 10**9, 256, "tile/63/x001/x000/x000/000"),
    ],
)
def test_paths_are_those_of_the_specification(level: int | str, index: int, width: int, path: str) -> None:
    assert tile_path(level, index, width) == path


def test_the_files_of_a_tree_are_those_of_the_specification() -> None:
    """tlog-tiles: a tree of 70,000; and one of 256, a full tile and a partial one of width 1 above it."""
    places = list(tile_paths(70_000))
    assert len([place for place in places if place[0] == 0]) == 274
    assert len([place for place in places if place[0] == ENTRIES]) == 274
    assert [place for place in places if place[0] in (1, 2)] == [(1, 0, 256), (1, 1, 17), (2, 0, 1)]
    assert list(tile_paths(256)) == [(0, 0, 256), (ENTRIES, 0, 256), (1, 0, 1)]
    assert list(tile_paths(0)) == []


@given(st.lists(st.binary(max_size=300), max_size=256))
@settings(max_examples=50, deadline=None)
def test_a_bundle_is_read_as_it_was_written(leaves: list[bytes]) -> None:
    data = encode_bundle(leaves)
    assert decode_bundle(data, len(leaves)) == leaves
    for wrong, width in ((data + b"\0", len(leaves)), (data, len(leaves) + 1), (data[:-1], len(leaves))):
        if wrong != data or width != len(leaves):
            with pytest.raises(ExportError):
                decode_bundle(wrong, width)


def test_a_leaf_too_long_for_a_bundle_is_refused() -> None:
    assert decode_bundle(encode_bundle([b"x" * 65535]), 1) == [b"x" * 65535]
    with pytest.raises(ExportError):
        encode_bundle([b"x" * 65536])


@pytest.mark.parametrize("size", [0, 1, 2, 255, 256, 257, 511, 512, 700, 65_536, 66_000])
def test_an_export_is_read_back_proved_from_and_verified(size: int, tmp_path: Path) -> None:
    leaves = some(size)
    folder = export(tmp_path / "log", leaves, durable=size < 600)
    assert [path.name for path in tmp_path.iterdir()] == ["log"]
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert found == {tile_path(*place) for place in tile_paths(size)} | {CHECKPOINT}
    report = verify_export(folder, VKEY)
    assert (report.problems, report.leaves, report.size, report.name) == ([], size, size, LOG.name)
    tiles, memory = TileFolder(folder), MemoryTiles(leaf_hashes(leaves))
    for index in {0, size // 3, size - 1} if size else ():
        path = inclusion_proof(tiles, index, size)
        check_inclusion(leaf_hash(leaves[index]), index, memory.frontier.head(), path)
    for old in {1, size // 2, size} if size > 1 else ():
        path = consistency_proof(tiles, old, size)
        before = MemoryTiles(leaf_hashes(leaves[:old])).frontier.head()
        check_consistency(before, memory.frontier.head(), path)
        assert verify_export(folder, VKEY, known=[before]).ok


def test_an_export_is_whole_or_not_there(tmp_path: Path) -> None:
    leaves = some(600)
    head = MemoryTiles(leaf_hashes(leaves)).frontier.head()

    def failing() -> object:
        yield from leaves[:400]
        raise RuntimeError("the database went away")

    with pytest.raises(RuntimeError):
        write_export(tmp_path / "log", failing(), head, {})  # type: ignore[arg-type]
    for wrong in (leaves[:599], [*leaves, b"more"], leaves[::-1]):
        with pytest.raises(ExportError):
            write_export(tmp_path / "log", wrong, head, {})
    assert list(tmp_path.iterdir()) == []
    export(tmp_path / "log", leaves)
    with pytest.raises(ExportError):
        export(tmp_path / "log", leaves)
    with pytest.raises(ExportError):
        export(tmp_path / "nowhere" / "log", leaves)


def test_a_full_tile_stands_for_its_partial_ones(tmp_path: Path) -> None:
    """tlog-tiles: partial tiles may go once the full one is there."""
    tiles = TileFolder(export(tmp_path / "log", some(700)))
    memory = MemoryTiles(leaf_hashes(some(700)))
    assert tiles.tile(0, 1, 44) == memory.tile(0, 1, 44)
    assert tiles.entries(1, 44) == some(300)[256:]
    path = inclusion_proof(tiles, 10, 300)
    check_inclusion(leaf_hash(some(700)[10]), 10, MemoryTiles(leaf_hashes(some(300))).frontier.head(), path)
    for level, index, width in ((0, 2, 189), (0, 3, 1), (1, 0, 3), (2, 0, 1)):
        with pytest.raises(ExportError):
            tiles.tile(level, index, width)


def test_files_that_are_no_plain_files_are_refused(tmp_path: Path) -> None:
    """A link, a pipe that would wait for ever, a folder, a file without end."""
    folder = export(tmp_path / "log", some(700))
    place = folder / "tile" / "0" / "000"
    data = place.read_bytes()

    def link() -> None:
        (tmp_path / "elsewhere").write_bytes(data)
        place.symlink_to(tmp_path / "elsewhere")

    def endless() -> None:
        place.write_bytes(b"")
        os.truncate(place, 1 << 33)

    for spoil in (link, lambda: os.mkfifo(place), place.mkdir, endless):
        place.unlink()
        spoil()
        report = verify_export(folder, VKEY)
        assert not report.ok
        with pytest.raises(TreeError):
            TileFolder(folder).tile(0, 0, 256)
        if place.is_dir():
            place.rmdir()
        else:
            place.unlink()
        place.write_bytes(data)
    assert verify_export(folder, VKEY).ok


# -- the root log ------------------------------------------------------------------------------------------------------


class World:
    """Two tenants, the system log, and a root log that covers them; one `commit` is one batch."""

    def __init__(self) -> None:
        self.leaves: dict[str, list[bytes]] = {"system": [], "tenant/a": [], "tenant/b": []}
        self.root = MemoryTiles()
        self.root_leaves: list[tuple[bytes, RootLeafOpening]] = []
        self.note = b""

    def commit(self, **grown: int) -> None:
        for name, count in grown.items():
            log = self.leaves[name.replace("_", "/")]
            log += [b"%s %d" % (name.encode(), len(log) + number) for number in range(count)]
        openings = seal({name.replace("_", "/"): self.head(name.replace("_", "/")) for name in grown})
        self.root_leaves += [(opening.commitment(), opening) for opening in openings]
        self.root.extend(leaf_hashes(opening.commitment() for opening in openings))
        self.note = sign_checkpoint(root_checkpoint(LOG.name, self.root.frontier.head()), [LOG])

    def head(self, name: str) -> TreeHead:
        return MemoryTiles(leaf_hashes(self.leaves[name])).frontier.head()

    def proof(self, name: str) -> HeadProof:
        index = max(at for at, (_, opening) in enumerate(self.root_leaves) if opening.name == name)
        path = tuple(inclusion_proof(self.root, index, self.root.frontier.size))
        return HeadProof(self.root_leaves[index][1], index, path, self.note)


@pytest.fixture
def world() -> World:
    made = World()
    made.commit(system=3, tenant_a=300, tenant_b=1)
    made.commit(tenant_a=40)
    made.commit(system=1, tenant_b=500)
    return made


def test_one_checkpoint_covers_every_sub_log(world: World) -> None:
    """Also tenant a, which the last batch did not touch."""
    for name, leaves in world.leaves.items():
        sealed = check_head(parse_head_proof(world.proof(name).to_bytes()), [LOG.verifier])
        assert (sealed.name, sealed.head) == (name, world.head(name))
        tiles = MemoryTiles(leaf_hashes(leaves))
        for index in (0, len(leaves) - 1):
            path = tuple(inclusion_proof(tiles, index, len(leaves)))
            proof = LeafProof(index, path, world.proof(name))
            assert parse_leaf_proof(proof.to_bytes()) == proof
            assert check_leaf(proof, leaves[index], [LOG.verifier]).name == name
            with pytest.raises(ProofError):
                check_leaf(proof, leaves[index] + b" ", [LOG.verifier])


def test_a_sub_log_is_exported_with_its_sealed_head(world: World, tmp_path: Path) -> None:
    proof = world.proof("tenant/b").to_bytes()
    write_export(tmp_path / "b", world.leaves["tenant/b"], world.head("tenant/b"), {HEAD_PROOF: proof}, durable=False)
    report = verify_export(tmp_path / "b", VKEY, name="tenant/b")
    assert (report.problems, report.name, report.leaves) == ([], "tenant/b", 501)
    assert report.signed is not None
    assert report.signed.checkpoint.head == world.root.frontier.head()
    assert "tenant/b" in verify_export(tmp_path / "b", VKEY, name="tenant/a").problems[0].text
    (tmp_path / "b" / HEAD_PROOF).write_bytes(world.proof("tenant/a").to_bytes())
    assert not verify_export(tmp_path / "b", VKEY).ok


def test_every_edit_of_an_opening_is_refused(world: World) -> None:
    proof = world.proof("tenant/a")
    data = proof.opening.to_bytes()
    for place in range(len(data)):
        wrong = bytearray(data)
        wrong[place] ^= 1
        with pytest.raises(ProofError):
            opening = RootLeafOpening.from_bytes(bytes(wrong))
            check_head(HeadProof(opening, proof.index, proof.path, proof.note), [LOG.verifier])
    for wrong_length in (b"", data[:72], data[:71], data + b"n" * 1024):
        with pytest.raises(ProofError):
            RootLeafOpening.from_bytes(wrong_length)
    for name in ("", "n" * 1025):
        with pytest.raises(ProofError):
            seal({name: TreeHead(0, EMPTY_ROOT)})


def test_a_root_leaf_says_nothing_about_its_sub_log() -> None:
    """R1, with its control: without the salt, whoever can guess name and head recognises the leaf."""
    heads = {"tenant/a": MemoryTiles(leaf_hashes(some(10))).frontier.head()}
    first, second = seal(heads)[0], seal(heads)[0]
    assert first.head == second.head
    assert first.commitment() != second.commitment()
    assert len(first.commitment()) == 32
    unsalted = [opening._replace(salt=bytes(32)).commitment() for opening in (first, second)]
    assert unsalted[0] == unsalted[1]


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"\n\n",
        b"c2sp.org/tlog-proof@v1\nindex 0\n\nnote",
        b"c2sp.org/tlog-proof@v1\nextra AAAA\nindex 0\n\nnote",
        b"c2sp.org/tlog-proof@v1\nextra {opening}\nindex 00\n\nnote",
        b"c2sp.org/tlog-proof@v1\nextra {opening}\nindex -1\n\nnote",
        b"c2sp.org/tlog-proof@v1\nextra {opening}\nindex\n\nnote",
        b"c2sp.org/tlog-proof@v1\nextra {opening}\nindex 0\nAAAA=\n\nnote",
        b"c2sp.org/tlog-proof@v2\nextra {opening}\nindex 0\n\nnote",
        b"c2sp.org/tlog-proof@v1\nextra {opening}\nindex 0\n" + b"A" * 44 + b"\n" * 1 + b"AAAA\n" * 70 + b"\nnote",
        "c2sp.org/tlog-proof@v1\nextra {opening}\nindex ١\n\nnote".encode(),
    ],
)
def test_what_is_no_proof_is_refused(wrong: bytes, world: World) -> None:
    import base64

    opening = base64.b64encode(world.proof("system").opening.to_bytes())
    with pytest.raises(ProofError):
        parse_head_proof(wrong.replace(b"{opening}", opening))
    with pytest.raises(ProofError):
        parse_leaf_proof(wrong.replace(b"{opening}", opening))


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_no_bytes_do_worse_than_be_refused(data: st.DataObject) -> None:
    """Every reader of stored or sent bytes, on good bytes that were cut, doubled or overwritten."""
    other = SigningKey.from_seed(LOG.name, KeyKind.ED25519, bytes(32))
    frontier = MemoryTiles(leaf_hashes(some(7))).frontier
    opening = RootLeafOpening("tenant/a", frontier.head(), bytes(32))
    head = HeadProof(opening, 0, (bytes(32),), sign_checkpoint(root_checkpoint(LOG.name, frontier.head()), [LOG]))
    readers: list[tuple[Callable[[bytes], object], bytes]] = [
        (parse_head_proof, head.to_bytes()),
        (parse_leaf_proof, LeafProof(3, (bytes(32),) * 3, head).to_bytes()),
        (RootLeafOpening.from_bytes, opening.to_bytes()),
        (Frontier.from_bytes, frontier.to_bytes()),
        (parse_rotation, rotation_record(LOG, other, frontier.head(), 5)),
        (lambda raw: decode_bundle(raw, 3), encode_bundle(some(3))),
        (lambda raw: parse_vkey(raw.decode(errors="replace")), VKEY.encode()),
    ]
    read, good = data.draw(st.sampled_from(readers))
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(good))] * 2)))
    raw = good[:start] + data.draw(st.binary(max_size=40) | st.just(good[start:end] * 2)) + good[end:]
    try:
        read(raw)
    except LedgerError:
        assert raw != good


def test_a_head_under_another_log_or_key_is_refused(world: World) -> None:
    proof = world.proof("system")
    stranger = SigningKey.from_seed(LOG.name, KeyKind.ED25519, bytes(32))
    for note, error in (
        (sign_checkpoint(root_checkpoint(LOG.name, world.root.frontier.head()), [stranger]), NoteError),
        (sign_checkpoint(Checkpoint(LOG.name, 5, bytes(32)), [LOG]), ProofError),
    ):
        with pytest.raises(error):
            check_head(HeadProof(proof.opening, proof.index, proof.path, note), [LOG.verifier])
    with pytest.raises(NoteError):
        check_head(proof, [LOG.verifier], witness_threshold=1)
