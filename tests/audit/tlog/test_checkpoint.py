"""Notes and checkpoints: what is accepted, every byte that is not, and keys."""

from __future__ import annotations

import base64
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcustody.audit.leaf.merkle import EMPTY, EMPTY_ROOT, TreeHead, leaf_hashes
from kvcustody.audit.tlog.checkpoint import (
    Checkpoint,
    check_witness_time,
    open_checkpoint,
    open_note,
    parse_checkpoint,
)
from kvcustody.audit.tlog.key_rotation import check_period, key_periods, parse_rotation, rotation_record
from kvcustody.audit.tlog.proofs import MemoryTiles, ProofError, consistency_proof
from kvcustody.audit.tlog.signed_note import (
    NOTE_BYTES_MAX,
    KeyKind,
    Note,
    NoteError,
    NoteSignature,
    VerifierKey,
    parse_note,
    parse_signatures,
    parse_vkey,
)
from kvcustody.audit.tlog.signing_key import (
    SigningKey,
    SigningKeyError,
    create_signing_key,
    read_signing_key,
    sign_checkpoint,
    sign_successor,
)

ORIGIN = "ledger.example/root"
HEAD = EMPTY.extend(leaf_hashes([b"%d" % number for number in range(1000)])).frontier.head()
CHECKPOINT = Checkpoint(ORIGIN, *HEAD)
LOG = SigningKey.from_seed(ORIGIN, KeyKind.ED25519, bytes(range(32)))
LATTICE = SigningKey.from_seed(ORIGIN, KeyKind.ML_DSA_44, bytes(range(1, 33)))
WITNESS = SigningKey.from_seed("witness.example/w1", KeyKind.COSIGNATURE, bytes(range(2, 34)))
STRANGER = SigningKey.from_seed(ORIGIN, KeyKind.ED25519, bytes(range(3, 35)))

# Published with Go's note package, which signed-note describes.
GO_VKEY = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"
GO_SKEY = "PRIVATE+KEY+PeterNeumann+c74f20a3+AYEKFALVFGyNhPJEMzD1QIDr+Y7hfZx09iUvxdXHKDFz\n"
GO_TEXT = "If you think cryptography is the answer to your problem,\nthen you don't know what your problem is.\n"
GO_LINE = (
    "— PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM=\n"
)


def test_the_published_note_opens_and_is_made_again(tmp_path: Path) -> None:
    note = f"{GO_TEXT}\n{GO_LINE}".encode()
    key = parse_vkey(GO_VKEY)
    assert str(key) == GO_VKEY
    assert open_note(note, [key]) == (GO_TEXT, ((key, 0),))
    (tmp_path / "key").write_text(GO_SKEY)
    (tmp_path / "key").chmod(0o600)
    made = Note(GO_TEXT, (read_signing_key(tmp_path / "key").sign(GO_TEXT),)).to_bytes()
    assert made == note


def test_every_edit_of_a_published_key_is_refused() -> None:
    for place in range(len(GO_VKEY)):
        for wrong in (
            GO_VKEY[:place],
            GO_VKEY[place + 1 :],
            GO_VKEY[:place] + chr(ord(GO_VKEY[place]) ^ 1) + GO_VKEY[place + 1 :],
        ):
            with pytest.raises(NoteError):
                parse_vkey(wrong)


@pytest.mark.parametrize("key", [LOG, LATTICE, WITNESS], ids=lambda key: key.kind.name)
def test_each_kind_signs_and_verifies_and_no_edit_of_the_note_does(key: SigningKey) -> None:
    note = sign_checkpoint(CHECKPOINT, [key], at_seconds=1_700_000_000)
    text, (line,) = open_note(note, [key.verifier])
    assert (text, line.key) == (CHECKPOINT.text(), key.verifier)
    assert line.at_seconds == (0 if key.kind is KeyKind.ED25519 else 1_700_000_000)
    assert parse_vkey(str(key.verifier)) == key.verifier
    assert parse_note(note).to_bytes() == note
    step = 1 if len(note) < 400 else 7
    for place in range(0, len(note), step):
        wrong = bytearray(note)
        wrong[place] ^= 1 + place % 255
        with pytest.raises(NoteError):
            open_note(bytes(wrong), [key.verifier])
    for cut in range(0, len(note), step):
        with pytest.raises(NoteError):
            open_note(note[:cut], [key.verifier])


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"\n",
        b"text\n",
        b"text\n\n",
        b"text\n\n\n",
        "text\n— a AAAAAAAA\n".encode(),
        "text\n\n— a AAAAAAAA".encode(),
        "text\n\n— a AAAAAAAA\n\n".encode(),
        "text\n\n— a AAAAAAAA\nmore\n".encode(),
        b"text\n\n- a AAAAAAAA\n",
        "text\n\n—a AAAAAAAA\n".encode(),
        "text\n\n—  AAAAAAAA\n".encode(),
        "text\n\n— a  AAAAAAAA\n".encode(),
        "text\n\n— a AAAAAAAA \n".encode(),
        "text\n\n— a+b AAAAAAAA\n".encode(),
        "text\n\n— a\u00a0b AAAAAAAA\n".encode(),
        "text\n\n— a AAAAAA==\n".encode(),  # four bytes: an id and nothing signed
        "text\n\n— a AAAAAAAA=\n".encode(),
        "text\n\n— a AAAAAAB=\n".encode(),  # bits behind the last byte
        "text\n\n— a AAAA_AAA\n".encode(),
        "te\txt\n\n— a AAAAAAAA\n".encode(),
        "text\r\n\n— a AAAAAAAA\n".encode(),
        "text\0\n\n— a AAAAAAAA\n".encode(),
        "text\n\n— a AAAAAAAA\n".encode("utf-16"),
        b"\xfftext\n\n\xe2\x80\x94 a AAAAAAAA\n",
        ("text\n\n" + "— a AAAAAAAA\n" * 65).encode(),
        b"t" * NOTE_BYTES_MAX + "\n\n— a AAAAAAAA\n".encode(),
    ],
)
def test_what_is_no_note_is_refused(wrong: bytes) -> None:
    with pytest.raises(NoteError):
        parse_note(wrong)


def test_a_note_of_sixteen_post_quantum_signatures_is_read() -> None:
    """signed-note: verifiers must accept at least sixteen signatures, of up to nearly 5 kB."""
    lines = tuple(NoteSignature(f"witness.example/{number}", bytes(4), bytes(4_900)) for number in range(16))
    note = Note(CHECKPOINT.text(), (LOG.sign(CHECKPOINT.text()), *lines)).to_bytes()
    assert open_checkpoint(note, [LOG.verifier]).checkpoint == CHECKPOINT


def test_an_empty_line_in_the_text_is_text() -> None:
    text = "one\n\ntwo\n"
    note = Note(text, (LOG.sign(text),)).to_bytes()
    assert open_note(note, [LOG.verifier])[0] == text
    with pytest.raises(NoteError):
        parse_checkpoint(text)


@pytest.mark.parametrize(
    "wrong",
    [
        "o\n1\n",
        "o\n1\n{root}",
        "o\n01\n{root}\n",
        "o\n+1\n{root}\n",
        "o\n-1\n{root}\n",
        "o\n1 \n{root}\n",
        "o\n1_0\n{root}\n",
        "o\n١\n{root}\n",
        "o\n9223372036854775808\n{root}\n",
        "o\n99999999999999999999\n{root}\n",
        "o\n\n{root}\n",
        "\n1\n{root}\n",
        "o\n1\n{root}\n\n",
        "o\n1\n{root}\n\next\n",
        "o\n1\n{root}A\n",
        "o\n1\n \n",
        "o\n1\nAAAA\n",
        "o\n0\n{root}\n",  # the empty tree has one root, and this is not it
        "{long}\n1\n{root}\n",
    ],
)
def test_what_is_no_checkpoint_is_refused(wrong: str) -> None:
    root = base64.b64encode(HEAD.root).decode()
    with pytest.raises(NoteError):
        parse_checkpoint(wrong.format(root=root, long="o" * 256))


@given(st.binary(max_size=400) | st.text(max_size=200).map(lambda text: text.encode(errors="surrogatepass")))
@settings(max_examples=300, deadline=None)
def test_no_bytes_do_worse_than_be_refused(data: bytes) -> None:
    for variant in (data, b"text\n\n" + data, CHECKPOINT.text().encode() + b"\n" + data):
        try:
            note = parse_note(variant)
        except NoteError:
            continue
        assert note.to_bytes() == variant


@given(
    size=st.integers(1, 2**63 - 1),
    root=st.binary(min_size=32, max_size=32),
    extensions=st.lists(
        st.text(st.characters(min_codepoint=32, exclude_categories=["Cs"]), min_size=1, max_size=9),
        max_size=2,
    ),
)
@settings(max_examples=60, deadline=None)
def test_a_checkpoint_is_read_as_it_was_written(size: int, root: bytes, extensions: list[str]) -> None:
    checkpoint = Checkpoint(ORIGIN, size, root, tuple(extensions))
    assert parse_checkpoint(checkpoint.text()) == checkpoint
    assert open_checkpoint(sign_checkpoint(checkpoint, [LOG]), [LOG.verifier]).checkpoint == checkpoint


def test_the_empty_log_has_a_checkpoint() -> None:
    empty = Checkpoint(ORIGIN, 0, EMPTY_ROOT)
    note = sign_checkpoint(empty, [LOG, LATTICE, WITNESS], at_seconds=1)
    found = open_checkpoint(note, [LOG.verifier, LATTICE.verifier], witnesses=[WITNESS.verifier], log_threshold=2)
    assert (found.checkpoint, len(found.log), len(found.witnesses)) == (empty, 2, 1)


# -- who is trusted ---------------------------------------------------------------------------------------


def test_unknown_keys_are_ignored_and_known_ones_must_verify() -> None:
    text = CHECKPOINT.text()
    good, forged = LOG.sign(text), LOG.sign(text)._replace(data=bytes(64))
    other = STRANGER.sign(text)
    assert open_checkpoint(Note(text, (other, good)).to_bytes(), [LOG.verifier]).checkpoint == CHECKPOINT
    for lines in (
        (other,),
        (forged, good),
        (good, forged),
        (other._replace(key_id=LOG.verifier.key_id), good),
    ):
        with pytest.raises(NoteError):
            open_checkpoint(Note(text, lines).to_bytes(), [LOG.verifier])
    with pytest.raises(NoteError):
        open_checkpoint(Note(text, (good,)).to_bytes(), [])


def test_a_key_of_one_log_signs_for_no_other() -> None:
    other = SigningKey.from_seed("ledger.example/other", KeyKind.ED25519, bytes(32))
    with pytest.raises(NoteError):
        open_checkpoint(sign_checkpoint(CHECKPOINT, [other]), [other.verifier])
    assert open_note(sign_checkpoint(CHECKPOINT, [other]), [other.verifier])  # the control: the line itself is good


def test_a_witness_is_no_log_and_a_log_no_witness() -> None:
    by_witness = sign_checkpoint(CHECKPOINT, [WITNESS], at_seconds=5)
    with pytest.raises(NoteError):
        open_checkpoint(by_witness, [LOG.verifier], witnesses=[WITNESS.verifier])
    by_log = sign_checkpoint(CHECKPOINT, [LOG])
    with pytest.raises(NoteError):
        open_checkpoint(by_log, [LOG.verifier], witnesses=[WITNESS.verifier], witness_threshold=1)
    both = sign_checkpoint(CHECKPOINT, [LOG, WITNESS, WITNESS], at_seconds=5)
    found = open_checkpoint(both, [LOG.verifier], witnesses=[WITNESS.verifier], witness_threshold=1)
    assert {line.at_seconds for line in found.witnesses} == {5}
    with pytest.raises(NoteError):  # twice the same witness is one
        open_checkpoint(both, [LOG.verifier], witnesses=[WITNESS.verifier], witness_threshold=2)
    with pytest.raises(NoteError):  # an Ed25519 line alone, where the reader asks for both algorithms
        open_checkpoint(by_log, [LOG.verifier, LATTICE.verifier], log_threshold=2)


@pytest.mark.parametrize("key", [WITNESS, LATTICE], ids=lambda key: key.kind.name)
def test_a_cosignature_covers_its_time(key: SigningKey) -> None:
    line = key.sign(CHECKPOINT.text(), at_seconds=1_679_315_147)
    assert open_note(Note(CHECKPOINT.text(), (line,)).to_bytes(), [key.verifier])[1][0].at_seconds == 1_679_315_147
    moved = line._replace(data=(1_679_315_148).to_bytes(8, "big") + line.data[8:])
    for wrong in (moved, line._replace(data=b"\xff" * 8 + line.data[8:]), line._replace(data=line.data[:6])):
        with pytest.raises(NoteError):
            open_note(Note(CHECKPOINT.text(), (wrong,)).to_bytes(), [key.verifier])


def test_a_witness_that_is_late_or_ahead_is_refused() -> None:
    line = WITNESS.sign(CHECKPOINT.text(), at_seconds=1_679_315_147)
    found = parse_signatures((line.line() + LOG.sign(CHECKPOINT.text()).line()).encode())
    assert found[0] == line
    with pytest.raises(NoteError):
        parse_signatures(b"junk\n\n" + line.line().encode())
    signed = open_checkpoint(
        sign_checkpoint(CHECKPOINT, [LOG, WITNESS], at_seconds=100),
        [LOG.verifier],
        witnesses=[WITNESS.verifier],
    )
    check_witness_time(signed, now_seconds=150, age_seconds_max=50)
    for now, age in ((151, 50), (99, 50)):
        with pytest.raises(NoteError):
            check_witness_time(signed, now_seconds=now, age_seconds_max=age)


def test_extension_lines_need_a_signature_that_covers_them() -> None:
    """C3, with its control: without extension lines the same key is enough."""
    extended = Checkpoint(ORIGIN, *HEAD, ("more",))
    with pytest.raises(NoteError):
        LATTICE.sign(extended.text())
    stripped = LATTICE.sign(CHECKPOINT.text())
    with pytest.raises(NoteError):
        open_checkpoint(Note(extended.text(), (stripped,)).to_bytes(), [LATTICE.verifier])
    assert open_checkpoint(Note(CHECKPOINT.text(), (stripped,)).to_bytes(), [LATTICE.verifier])


def test_the_three_types_of_one_ed25519_key_are_three_keys() -> None:
    seed = bytes(range(9, 41))
    plain = SigningKey.from_seed(ORIGIN, KeyKind.ED25519, seed)
    timed = SigningKey.from_seed(ORIGIN, KeyKind.COSIGNATURE, seed)
    assert plain.verifier.public == timed.verifier.public
    assert plain.verifier.key_id != timed.verifier.key_id
    line = timed.sign(CHECKPOINT.text(), at_seconds=3)
    as_plain = line._replace(key_id=plain.verifier.key_id, data=line.data[8:])
    with pytest.raises(NoteError):
        open_note(Note(CHECKPOINT.text(), (as_plain,)).to_bytes(), [plain.verifier])


@pytest.mark.parametrize("name", ["", "a b", "a+b", "a\u2003b", "a\nb", "a\x01", "n" * 256, "\ud800"])
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(NoteError):
        SigningKey.from_seed(name, KeyKind.ED25519, bytes(32))
    with pytest.raises(NoteError):
        VerifierKey(name, KeyKind.ED25519, bytes(32))


# -- signing ---------------------------------------------------------------------------------------------------


def test_nothing_is_signed_that_contradicts_what_was() -> None:
    leaves = [b"%d" % number for number in range(1500)]
    tiles = MemoryTiles(leaf_hashes(leaves))
    longer, proof = tiles.frontier.head(), consistency_proof(tiles, HEAD.size, 1500)
    note = sign_successor(HEAD, Checkpoint(ORIGIN, *longer), proof, [LOG])
    assert open_checkpoint(note, [LOG.verifier]).checkpoint.head == longer
    for previous, next_, path in (
        (longer, HEAD, []),
        (HEAD, longer, []),
        (HEAD, TreeHead(HEAD.size, bytes(32)), []),
        (TreeHead(HEAD.size, bytes(32)), longer, proof),
    ):
        with pytest.raises(ProofError):
            sign_successor(previous, Checkpoint(ORIGIN, *next_), path, [LOG])
    with pytest.raises(NoteError):  # no malformed note leaves
        sign_checkpoint(Checkpoint("a\tb", *HEAD), [LOG])


@pytest.mark.parametrize("kind", KeyKind, ids=lambda kind: kind.name)
def test_a_key_file_is_private_whole_and_never_replaced(kind: KeyKind, tmp_path: Path) -> None:
    path = tmp_path / "log.key"
    key = create_signing_key(path, ORIGIN, kind)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [item.name for item in tmp_path.iterdir()] == ["log.key"]
    assert read_signing_key(path) == key
    assert repr(key) == f"SigningKey(name={ORIGIN!r}, kind={kind!r})"
    before = path.read_bytes()
    with pytest.raises(SigningKeyError, match="already exists"):
        create_signing_key(path, ORIGIN, kind)
    assert path.read_bytes() == before
    for place in range(len(before)):
        path.write_bytes(before[:place] + bytes([before[place] ^ 1]) + before[place + 1 :])
        with pytest.raises(SigningKeyError, match="malformed"):
            read_signing_key(path)


def test_an_exposed_or_odd_key_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.key"
    create_signing_key(path, ORIGIN)
    path.chmod(0o640)
    with pytest.raises(SigningKeyError, match="chmod 600"):
        read_signing_key(path)
    path.chmod(0o600)
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("link", "pipe", "missing", "."):
        with pytest.raises(SigningKeyError):
            read_signing_key(tmp_path / name)
    for wrong in (b"", b"\xff", b"PRIVATE+KEY+", b"x" * 2000):
        path.write_bytes(wrong)
        with pytest.raises(SigningKeyError):
            read_signing_key(path)
    with pytest.raises(SigningKeyError):
        create_signing_key(tmp_path / "nowhere" / "log.key", ORIGIN)


# -- rotation --------------------------------------------------------------------------------------------------

LATER = TreeHead(1200, bytes(range(32)))
SECOND = SigningKey.from_seed(ORIGIN, KeyKind.ED25519, bytes(range(50, 82)))


def test_one_key_leads_to_all_that_follow_it() -> None:
    records = [rotation_record(LOG, SECOND, HEAD, 100), rotation_record(SECOND, LATTICE, LATER, 200)]
    periods = key_periods(LOG.verifier, records)
    assert [(period.key, period.first_size, period.last_size) for period in periods] == [
        (LOG.verifier, 0, 1000),
        (SECOND.verifier, 1000, 1200),
        (LATTICE.verifier, 1200, None),
    ]
    for key, size, may in (
        (LOG, 1000, True),
        (LOG, 1001, False),
        (SECOND, 999, False),
        (SECOND, 1200, True),
        (LATTICE, 1199, False),
        (LATTICE, 10**9, True),
        (STRANGER, 1000, False),
    ):
        note = sign_checkpoint(Checkpoint(ORIGIN, size, bytes(32)), [key])
        signed = open_checkpoint(note, [key.verifier])
        if may:
            check_period(signed, periods)
        else:
            with pytest.raises(NoteError):
                check_period(signed, periods)


@pytest.mark.parametrize(("old", "new"), [(LOG, SECOND), (LOG, LATTICE), (LATTICE, SECOND)])
def test_every_edit_of_a_rotation_is_refused(old: SigningKey, new: SigningKey) -> None:
    record = rotation_record(old, new, HEAD, 100)
    assert parse_rotation(record) == (old.verifier, new.verifier, HEAD, 100)
    for place in range(0, len(record), 1 if len(record) < 1000 else 11):
        wrong = bytearray(record)
        wrong[place] ^= 1 + place % 255
        with pytest.raises(NoteError):
            parse_rotation(bytes(wrong))


def test_a_rotation_needs_both_keys_and_the_chain() -> None:
    record = rotation_record(LOG, SECOND, HEAD, 100)
    note = parse_note(record)
    for lines in (note.signatures[:1], note.signatures[1:], note.signatures[::-1], (note.signatures[0],) * 2):
        with pytest.raises(NoteError):
            parse_rotation(Note(note.text, lines).to_bytes())
    fork, back = (
        rotation_record(LOG, STRANGER, LATER, 100),
        rotation_record(SECOND, LOG, TreeHead(999, bytes(32)), 2),
    )
    for records in ([record, fork], [record, record], [record, back], [fork, record]):
        with pytest.raises(NoteError):
            key_periods(LOG.verifier, records)
    with pytest.raises(NoteError):
        key_periods(STRANGER.verifier, [record])
    other = SigningKey.from_seed("ledger.example/other", KeyKind.ED25519, bytes(32))
    for old, new in (
        (LOG, LOG),
        (LOG, other),
        (LOG, SigningKey.from_seed(ORIGIN, KeyKind.COSIGNATURE, bytes(32))),
    ):
        with pytest.raises(NoteError):
            rotation_record(old, new, HEAD, 100)


def test_a_rotation_is_no_checkpoint_and_a_checkpoint_no_rotation() -> None:
    """G4."""
    record = rotation_record(LOG, SECOND, HEAD, 100)
    with pytest.raises(NoteError):
        open_checkpoint(record, [LOG.verifier])
    assert open_note(record, [LOG.verifier, SECOND.verifier])  # the control: it is a good note
    with pytest.raises(NoteError):
        parse_rotation(sign_checkpoint(CHECKPOINT, [LOG, SECOND]))
    lattice = rotation_record(LATTICE, SECOND, HEAD, 100)
    with pytest.raises(NoteError):  # the lattice key's line in a statement has another id, and another context
        open_note(lattice, [LATTICE.verifier])
