"""Case F1: somebody who can write the ledger but not sign for it changes nothing unnoticed; and what needs a kept head.

A log of 2,000 real leaves. The positive control is the same content in a plain table, which its database calls sound
after every attack; and for what a holder of the signing key can do, the same check without the head that was kept.
"""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcustody.audit.kinds import Event, ResidencyOpened, ResidencyReleased
from kvcustody.audit.kinds.block_runs import Run
from kvcustody.audit.leaf import Context
from kvcustody.audit.leaf.batch_encoder import BatchEncoder
from kvcustody.audit.leaf.merkle import TreeHead, leaf_hash, leaf_hashes
from kvcustody.audit.tlog.checkpoint import check_witness_time, open_checkpoint
from kvcustody.audit.tlog.proofs import (
    MemoryTiles,
    ProofError,
    check_consistency,
    consistency_proof,
    inclusion_proof,
    root_of_inclusion,
)
from kvcustody.audit.tlog.root_log import root_checkpoint
from kvcustody.audit.tlog.signed_note import KeyKind, NoteError
from kvcustody.audit.tlog.signing_key import SigningKey, sign_checkpoint
from kvcustody.audit.tlog.tiles import CHECKPOINT, ENTRIES, TileFolder, encode_bundle, tile_path, write_export
from kvcustody.audit.verify import verify_tiles
from kvcustody.audit.verify.verify_tiles import ExportReport, TileFinding
from standins.audit.independent import fsck_tiles

LOG = SigningKey.from_seed("ledger.example/tenant-a", KeyKind.ED25519, bytes(range(32)))
VKEY = str(LOG.verifier)
WITNESS = SigningKey.from_seed("witness.example/w1", KeyKind.COSIGNATURE, bytes(range(5, 37)))
COUNT = 2000
Leaves = list[bytes]
Attack = Callable[[Leaves], Leaves]


def real_leaves(count: int, tenant: str = "a") -> Leaves:
    context = Context("ab" * 16, 1_700_000_000_000_000, lambda tenant, subject, session="": f"{len(session):024x}")
    recorded: list[Event] = []
    for number in range(count // 2):
        run = (Run(np.arange(number, number + 5), 1 + 5 * number),)
        opened = ResidencyOpened(
            number,
            number,
            tenant,
            "user",
            "chat",
            True,
            "internal",
            (1,),
            (),
            ("own",),
            3,
            number + 10**6,
            run,
        )
        released = ResidencyReleased(number + 1, number, tenant, "finished", (), 0)
        recorded += [opened, released]
    return list(BatchEncoder(context).encode(list(enumerate(recorded, 1))).batch.data)


LEAVES = real_leaves(COUNT)
TILES = MemoryTiles(leaf_hashes(LEAVES))
HEAD = TILES.frontier.head()


def write(folder: Path, content: Leaves, note: bytes | None = None) -> Path:
    """An export of `content`; with the honest note unless another is given."""
    head = MemoryTiles(leaf_hashes(content)).frontier.head()
    honest = sign_checkpoint(root_checkpoint(LOG.name, HEAD), [LOG])
    write_export(folder, content, head, {CHECKPOINT: honest if note is None else note}, durable=False)
    return folder


def verify_export(folder: Path, vkey: str, **more: Any) -> ExportReport:
    """The product's verdict; where it rests on the folder and the key alone, the independent fsck shares it."""
    found = verify_tiles.verify_export(folder, vkey, **more)
    assert more or fsck_tiles(folder, vkey) == found.ok, found.problems
    return found


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("honest") / "log", LEAVES)


@pytest.fixture
def copy(honest: Path, tmp_path: Path) -> Path:
    shutil.copytree(honest, tmp_path / "log")
    return tmp_path / "log"


# -- the positive control: rows in a table -----------------------------------------------------------------------------


def a_plain_table_is_sound(content: Leaves) -> bool:
    """What a database without a tree can say: its pages are whole, and no number is missing before the last."""
    table = sqlite3.connect(":memory:")
    table.execute("CREATE TABLE events (idx INTEGER PRIMARY KEY, leaf BLOB NOT NULL)")
    table.executemany("INSERT INTO events VALUES (?, ?)", enumerate(content))
    count, last = table.execute("SELECT count(*), max(idx) FROM events").fetchone()
    return table.execute("PRAGMA integrity_check").fetchone() == ("ok",) and count == last + 1


# -- every byte --------------------------------------------------------------------------------------------------------


def edits(leaf: bytes, step: int, values: int) -> Iterator[bytes]:
    """The leaf with one byte changed: every `step`-th byte, to so many other values."""
    for place in range(0, len(leaf), step):
        for flip in range(1, values + 1):
            yield leaf[:place] + bytes([leaf[place] ^ flip]) + leaf[place + 1 :]


def unseen_by_hash(values: int) -> tuple[int, int]:
    """Edits tried, and those that leave their leaf's hash as it was."""
    tried = missed = 0
    for leaf in LEAVES:
        right = leaf_hash(leaf)
        found = leaf_hashes(edits(leaf, 1, values))
        tried, missed = tried + len(found), missed + found.count(right)
    return tried, missed


def unseen_by_root(step: int) -> tuple[int, int]:
    """Edits tried, and those that leave the root as it was, recomputed from the leaf upwards."""
    tried = missed = 0
    for index, leaf in enumerate(LEAVES):
        path = inclusion_proof(TILES, index, COUNT)
        for edited in edits(leaf, step, 1):
            tried += 1
            missed += root_of_inclusion(leaf_hash(edited), index, COUNT, path) == HEAD.root
    return tried, missed


def test_no_single_byte_edit_keeps_its_leafs_hash_and_none_of_a_sample_keeps_the_root() -> None:
    total = sum(map(len, LEAVES))
    assert unseen_by_hash(1) == (total, 0)
    tried, missed = unseen_by_root(29)
    assert (tried > total // 32, missed) == (True, 0)


@pytest.mark.soak
def test_every_other_value_of_every_byte() -> None:
    total = sum(map(len, LEAVES))
    assert unseen_by_hash(255) == (255 * total, 0)
    assert unseen_by_root(1) == (total, 0)


def test_edited_bytes_of_an_export_are_found_and_their_leaf_named(copy: Path) -> None:
    chance = random.Random(3)
    for _ in range(60):
        index = chance.randrange(COUNT)
        bundle = index // 256
        width = min(256, COUNT - 256 * bundle)
        place = copy / tile_path(ENTRIES, bundle, width)
        data = place.read_bytes()
        start = sum(2 + len(leaf) for leaf in LEAVES[256 * bundle : index]) + 2
        where = start + chance.randrange(len(LEAVES[index]))
        assert data[start : start + len(LEAVES[index])] == LEAVES[index]
        place.write_bytes(data[:where] + bytes([data[where] ^ chance.randrange(1, 256)]) + data[where + 1 :])
        report = verify_export(copy, VKEY)
        assert [(problem.first, problem.last) for problem in report.problems] == [(index, index)]
        place.write_bytes(data)
    assert verify_export(copy, VKEY).ok


def every_byte(folder: Path, step: int) -> tuple[int, int]:
    tried = missed = 0
    for place in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = place.read_bytes()
        for where in range(0, len(data), step):
            place.write_bytes(data[:where] + bytes([data[where] ^ (1 + where % 255)]) + data[where + 1 :])
            tried += 1
            missed += verify_export(folder, VKEY).ok
        place.write_bytes(data)
    assert verify_export(folder, VKEY).ok
    return tried, missed


def small_export(folder: Path) -> Path:
    """One full tile of each kind, one partial one, and leaves short enough to try all of their bytes."""
    content = [b'{"sequence":%d}' % number for number in range(260)]
    head = MemoryTiles(leaf_hashes(content)).frontier.head()
    return write(folder, content, sign_checkpoint(root_checkpoint(LOG.name, head), [LOG]))


def test_edited_bytes_of_every_kind_of_file_are_found(tmp_path: Path) -> None:
    """Entries with their lengths, tiles of both levels, the checkpoint."""
    tried, missed = every_byte(small_export(tmp_path / "log"), 97)
    assert (tried > 130, missed) == (True, 0)


@pytest.mark.soak
def test_every_byte_of_every_file(tmp_path: Path) -> None:
    tried, missed = every_byte(small_export(tmp_path / "log"), 1)
    assert (tried > 13_000, missed) == (True, 0)


# -- leaves that come, go and move -------------------------------------------------------------------------------------

FOREIGN = real_leaves(COUNT, "b")
ATTACKS: dict[str, tuple[Attack, int]] = {  # the attack, and the first leaf that it makes wrong
    "edit": (
        lambda log: [
            *log[:1234],
            log[1234].replace(b"finished", b"finishes").replace(b"own", b"owm"),
            *log[1235:],
        ],
        1234,
    ),
    "delete the first": (lambda log: log[1:], 0),
    "delete one": (lambda log: log[:777] + log[778:], 777),
    "delete a range": (lambda log: log[:300] + log[700:], 300),
    "insert": (lambda log: [*log[:777], FOREIGN[0], *log[777:]], 777),
    "insert at the end": (lambda log: [*log, FOREIGN[0]], COUNT),
    "reorder neighbours": (lambda log: [*log[:900], log[901], log[900], *log[902:]], 900),
    "reorder far": (lambda log: [*log[:10], log[1990], *log[11:1990], log[10], *log[1991:]], 10),
    "reverse": (lambda log: log[::-1], 0),
    "duplicate": (lambda log: log[:501] + log[500:], 501),
    "duplicate over the next": (lambda log: [*log[:501], log[500], *log[502:]], 501),
    "splice in another log": (lambda log: log[:1000] + FOREIGN[1000:], 1000),
    "truncate the tail": (lambda log: log[:-1], COUNT - 1),
    "truncate to whole tiles": (lambda log: log[:1792], 1792),
    "truncate to nothing": (lambda log: [], 0),
    "replace the whole log": (lambda log: list(FOREIGN), 0),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attacker_without_the_key_is_seen(name: str, tmp_path: Path) -> None:
    """He rewrites leaves, tiles and files to agree with each other; the signed head is all that he cannot make."""
    attack, first = ATTACKS[name]
    content = attack(LEAVES)
    assert content != LEAVES
    report = verify_export(write(tmp_path / "log", content), VKEY)
    assert not report.ok
    assert report.first_bad_leaf is None or report.first_bad_leaf <= first
    if content:
        assert a_plain_table_is_sound(content)
    stranger = SigningKey.from_seed(LOG.name, KeyKind.ED25519, bytes(32))  # his own key and note, in the place of ours
    head = MemoryTiles(leaf_hashes(content)).frontier.head()
    note = sign_checkpoint(root_checkpoint(LOG.name, head), [stranger])
    forged = write(tmp_path / "forged", content, note)
    assert not verify_export(forged, VKEY).ok
    assert verify_export(forged, str(stranger.verifier)).ok, "the control: only the key tells the forgery from the log"


@pytest.mark.parametrize("name", [name for name in ATTACKS if "truncate" not in name and "the end" not in name])
def test_the_first_bad_leaf_is_named_where_tiles_are_left(name: str, copy: Path) -> None:
    """He rewrites the entries alone, in bundles of the right width."""
    attack, first = ATTACKS[name]
    content = (attack(LEAVES) + LEAVES)[:COUNT]
    for bundle in range(8):
        chunk = content[256 * bundle : 256 * bundle + 256]
        (copy / tile_path(ENTRIES, bundle, len(chunk))).write_bytes(encode_bundle(chunk))
    assert verify_export(copy, VKEY).first_bad_leaf == first


def test_a_plain_table_sees_no_edit() -> None:
    """The control for single bytes."""
    chance = random.Random(9)
    for _ in range(20):
        index = chance.randrange(COUNT)
        leaf = bytearray(LEAVES[index])
        leaf[chance.randrange(len(leaf))] ^= chance.randrange(1, 256)
        assert a_plain_table_is_sound([*LEAVES[:index], bytes(leaf), *LEAVES[index + 1 :]])


# -- what the holder of the key can do, and what then finds it ---------------------------------------------------------


def signed(content: Leaves, *keys: SigningKey, at_seconds: int = 0) -> bytes:
    head = MemoryTiles(leaf_hashes(content)).frontier.head()
    return sign_checkpoint(root_checkpoint(LOG.name, head), [LOG, *keys], at_seconds=at_seconds)


@pytest.mark.parametrize("name", ATTACKS)
def test_a_log_that_is_changed_and_signed_again_contradicts_a_kept_head(name: str, tmp_path: Path) -> None:
    """Window: everything since the head that the auditor, or a witness, kept last."""
    content = ATTACKS[name][0](LEAVES)
    folder = write(tmp_path / "log", content, signed(content))
    assert verify_export(folder, VKEY).ok, "the control: without a kept head this is a log like any other"
    report = verify_export(folder, VKEY, known=[HEAD])
    if name == "insert at the end":  # that is how a log grows
        assert report.ok
    else:
        assert not report.ok
    early = MemoryTiles(leaf_hashes(LEAVES[:5])).frontier.head()
    assert verify_export(folder, VKEY, known=[early]).ok == (ATTACKS[name][1] >= 5), "an older head sees less"
    assert not verify_export(folder, VKEY, witnesses=[str(WITNESS.verifier)], witness_threshold=1).ok


def test_a_fork_shows_as_soon_as_its_heads_meet(tmp_path: Path) -> None:
    """Two heads of one log, each sound by itself, for two readers."""
    other = [*LEAVES[:1500], *FOREIGN[1500:]]
    ours, theirs = (write(tmp_path / name, log, signed(log)) for name, log in (("ours", LEAVES), ("theirs", other)))
    assert verify_export(ours, VKEY).ok, "the control: alone, neither reader can tell"
    assert verify_export(theirs, VKEY).ok
    head = verify_export(theirs, VKEY)
    assert not verify_export(ours, VKEY, known=[TreeHead(head.size, head.root)]).ok
    longer = MemoryTiles(leaf_hashes([*other, b"more"]))
    for new, path in (
        (longer.frontier.head(), consistency_proof(longer, COUNT, COUNT + 1)),
        (TreeHead(COUNT, head.root), []),
    ):
        with pytest.raises(ProofError):
            check_consistency(HEAD, new, path)


def test_an_old_export_with_its_own_genuine_head_is_caught_by_its_age(tmp_path: Path) -> None:
    """Replaying what was once true needs no key at all: only a kept head, or a witness's time, shows that it is old."""
    content = LEAVES[:1792]
    note = signed(content, WITNESS, at_seconds=1_000)
    folder = write(tmp_path / "log", content, note)
    assert verify_export(folder, VKEY, witnesses=[str(WITNESS.verifier)], witness_threshold=1).ok, "the control"
    report = verify_export(folder, VKEY, known=[HEAD])
    assert [problem.first for problem in report.problems] == [1792]
    assert "was cut" in report.problems[0].text
    opened = open_checkpoint(note, [LOG.verifier], witnesses=[WITNESS.verifier])
    check_witness_time(opened, now_seconds=1_050, age_seconds_max=60)
    with pytest.raises(NoteError):
        check_witness_time(opened, now_seconds=2_000, age_seconds_max=60)


# -- what the report says ----------------------------------------------------------------------------------------------


def spoil(place: Path, at: int = 5) -> None:
    data = place.read_bytes()
    place.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


def places(report: ExportReport) -> list[tuple[int | None, int | None]]:
    return [(problem.first, problem.last) for problem in report.problems]


def test_damaged_tiles_are_told_from_bad_leaves(copy: Path) -> None:
    spoil(copy / "tile/0/003")
    spoil(copy / "tile/1/000.p/7")
    report = verify_export(copy, VKEY)
    assert report.first_bad_leaf is None
    assert [problem.text.split("`")[1] for problem in report.problems] == ["tile/0/003", "tile/1/000.p/7"]


def test_a_leaf_changed_with_its_tile_is_known_to_the_tile(copy: Path) -> None:
    spoil(copy / "tile/entries/003", 500)
    (copy / "tile/0/003").write_bytes(b"".join(leaf_hashes(TileFolder(copy).entries(3, 256))))
    report = verify_export(copy, VKEY)
    assert places(report) == [(768, 1023)]
    spoil(copy / "tile/1/000.p/7")  # and now nothing above it can be trusted either
    assert places(verify_export(copy, VKEY)) == [(0, COUNT - 1)]


def test_missing_and_malformed_bundles_are_named_and_the_rest_is_checked(copy: Path) -> None:
    (copy / "tile/entries/002").unlink()
    data = (copy / "tile/entries/004").read_bytes()
    (copy / "tile/entries/004").write_bytes(data[:-1])
    report = verify_export(copy, VKEY)
    assert places(report) == [(512, 767), (1024, 1279)]
    assert report.leaves == COUNT - 512
    spoil(copy / "tile/entries/006", 2 + 9)  # in the first leaf, behind its length
    assert places(verify_export(copy, VKEY)) == [(512, 767), (1024, 1279), (1536, 1536)]


def test_purged_leaves_are_accepted_where_the_reader_allows_it_and_still_hashed(copy: Path) -> None:
    """V5, with its control: the folder cannot grant itself the permission."""
    for bundle in range(3):
        (copy / tile_path(ENTRIES, bundle)).unlink()
    assert not verify_export(copy, VKEY).ok
    assert not verify_export(copy, VKEY, purged_below=512).ok
    report = verify_export(copy, VKEY, purged_below=768)
    assert (report.ok, report.leaves) == (True, COUNT - 768)
    spoil(copy / "tile/0/001")
    assert places(verify_export(copy, VKEY, purged_below=768)) == [(256, 511)]


def test_a_file_too_many_is_a_problem(copy: Path) -> None:
    """V2: a reader of the folder would take it for part of the log."""
    for name in (
        "tile/entries/008",
        "tile/0/009",
        "tile/entries/007.p/209",
        "tile/more",
        "tile/entries/x001/000",
    ):
        place = copy / name
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(encode_bundle([b"forged"]))
        [found] = [problem.text.split("`")[1] for problem in verify_export(copy, VKEY).problems]
        assert found == name or name.startswith(f"{found}/")  # a folder that does not belong is named as a whole
        place.unlink()
    (copy / "tile/entries/x002").symlink_to("/")
    assert not verify_export(copy, VKEY).ok


@pytest.mark.parametrize("name", ["log.ndjson", "tiles/0/000", "head.tlog-proof", ".tile", "checkpoint.old"])
def test_a_file_beside_the_tiles_is_a_problem(copy: Path, name: str) -> None:
    (copy / name).parent.mkdir(parents=True, exist_ok=True)
    (copy / name).write_bytes(b"forged")
    [problem] = verify_export(copy, VKEY).problems
    assert problem.text.startswith(f"`{name.split('/', maxsplit=1)[0]}` is no part")


@pytest.mark.parametrize("note", [b"", b"\n", b"x" * (1 << 20), None])
def test_an_export_without_a_head_is_one_problem(note: bytes | None, copy: Path) -> None:
    (copy / CHECKPOINT).unlink()
    if note is not None:
        (copy / CHECKPOINT).write_bytes(note)
    report = verify_export(copy, VKEY)
    assert len(report.problems) == 1
    assert isinstance(report.problems[0], TileFinding)
    assert "no head to verify against" in report.problems[0].text


def test_the_key_of_the_reader_must_be_one(copy: Path) -> None:
    with pytest.raises(NoteError):
        verify_export(copy, "no key")
    assert not verify_export(copy, str(WITNESS.verifier)).ok
    assert not verify_export(copy / "missing", VKEY).ok
