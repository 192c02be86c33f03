"""Exports (E1-E4, V1-V4): what is written verifies, what is changed does not, and two verifiers agree on it."""

from __future__ import annotations

import base64
import csv
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcustody.audit.exports import file_formats as chunks
from kvcustody.audit.exports import verify_standalone as lone
from kvcustody.audit.exports.export_writer import ExportSelection, write_export
from kvcustody.audit.exports.file_formats import LeafFormat
from kvcustody.audit.tlog.merkle import Frontier, TreeHead, leaf_hashes
from kvcustody.audit.tlog.proofs import MemoryTiles
from kvcustody.audit.tlog.signed_note import KeyKind, parse_note
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.audit.tlog.tiles import ExportError
from kvcustody.audit.verify import verify_export as export_verifier
from kvcustody.audit.verify.expected_heads import KeptHead
from kvcustody.audit.verify.verify_export import NO_WITNESS, verify_export

FORMS = list(LeafFormat)


@pytest.fixture
def folder(make_source: Callable[..., Any], tmp_path: Path) -> Path:
    write_export(tmp_path / "export", make_source(), made_at_us=1, chunk_leaves=100)
    return tmp_path / "export"


def lone_says(folder: Path, key: str, *more: str) -> subprocess.CompletedProcess[str]:
    """The verifier that came with the export, alone in an isolated interpreter."""
    program = [sys.executable, "-I", str(folder / "verify_kvcustody.py"), str(folder), "--key", key, *more]
    return subprocess.run(program, capture_output=True, text=True, check=False, timeout=60)


def lone_accepts(folder: Path, key: str) -> bool:
    try:
        lone.check_export(folder, key)
    except (lone.Bad, OSError, ValueError, KeyError, TypeError, LookupError, csv.Error):
        return False
    return True


@pytest.mark.parametrize("form", FORMS)
def test_an_export_verifies_by_a_public_key_alone(
    make_source: Callable[..., Any], key: SigningKey, tmp_path: Path, form: LeafFormat
) -> None:
    source = make_source()
    made = write_export(tmp_path / "export", source, form=form, made_at_us=1, chunk_leaves=100)
    verdict = verify_export(tmp_path / "export", [str(key.verifier)])
    assert verdict.problems == [] and verdict.whole and verdict.leaves == made.leaves == 348
    assert {log.name: log.kinds.total() for log in verdict.logs} == {
        "system": 7,
        "tenant/acme": 300,
        "tenant/beta": 41,
    }
    assert NO_WITNESS in verdict.limits
    said = lone_says(tmp_path / "export", str(key.verifier))
    if form is LeafFormat.PARQUET:
        assert said.returncode == 2 and "audit verify" in said.stdout
    else:
        assert said.returncode == 0 and "SOUND: 348 leaves" in said.stdout and "Split views" in said.stdout, (
            said
        )


def test_another_key_verifies_nothing(folder: Path) -> None:
    other = str(SigningKey.generate("ledger.example/test").verifier)
    assert not verify_export(folder, [other]).ok
    assert lone_says(folder, other).returncode == 1


def test_no_byte_of_an_export_can_be_changed(folder: Path, key: SigningKey, tmp_path: Path) -> None:
    """A seeded sample of single-byte edits over all files that carry evidence: both verifiers refuse each."""
    chance = random.Random(4)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    evidence = [path for path in files if path.name not in ("verify_kvcustody.py", "manifest.json")]
    survived: list[tuple[str, int]] = []
    for _ in range(60):
        path = chance.choice(evidence)
        data = path.read_bytes()
        at = chance.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1 :])
        if verify_export(folder, [str(key.verifier)]).ok or lone_accepts(folder, str(key.verifier)):
            survived.append((path.name, at))
        path.write_bytes(data)
    assert survived == [] and verify_export(folder, [str(key.verifier)]).ok


def rewrite(folder: Path, change: Callable[[list[bytes]], list[bytes]]) -> None:
    """Change the leaves of the largest log, and whatever of the manifest anybody can recompute."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    log = manifest["logs"][1]
    lines = [line for file in log["files"] for line in (folder / file["path"]).read_bytes().splitlines()]
    lines = change(lines)
    data = b"".join(line + b"\n" for line in lines)
    for other in log["files"][1:]:
        (folder / other["path"]).unlink()
    file = log["files"][0]
    (folder / file["path"]).write_bytes(data)
    digest = lone.hashlib.sha256(data).hexdigest()
    file |= {"leaves": len(lines), "bytes": len(data), "sha256": digest}
    log |= {"files": [file], "digest": digest, "leaves": len(lines)}
    log["range"]["end"] = len(lines)
    (folder / "manifest.json").write_text(json.dumps(manifest))


CHANGES: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "delete": lambda lines: lines[:50] + lines[51:],
    "insert": lambda lines: lines[:50] + lines[7:8] + lines[50:],
    "reorder": lambda lines: [*lines[:50], lines[51], lines[50], *lines[52:]],
    "duplicate": lambda lines: [*lines, lines[-1]],
    "splice": lambda lines: lines[:100] + lines[200:],
    "cut": lambda lines: lines[:-1],
    "edit": lambda lines: [lines[0].replace(b"finish", b"finisb"), *lines[1:]],
    "empty": lambda lines: [],
}


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_leaves_cannot_be_moved_with_the_manifest_put_right(folder: Path, key: SigningKey, name: str) -> None:
    rewrite(folder, lambda lines: lines)
    assert verify_export(
        folder, [str(key.verifier)]
    ).ok  # the positive control: the rewriting itself is accepted
    assert lone_accepts(folder, str(key.verifier))
    rewrite(folder, CHANGES[name])
    assert not verify_export(folder, [str(key.verifier)]).ok
    assert not lone_accepts(folder, str(key.verifier))


def test_a_sub_log_cannot_be_left_out_of_a_whole_export(folder: Path, key: SigningKey) -> None:
    manifest = json.loads((folder / "manifest.json").read_bytes())
    shutil.rmtree(folder / manifest["logs"].pop(0)["folder"])
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert verify_export(folder, [str(key.verifier)]).problems == ["log `system` was left out"]
    assert "left out" in lone_says(folder, str(key.verifier)).stdout
    manifest["openings"] = False  # then it is an export of a part, and says so
    (folder / "root.ndjson").unlink()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    found = verify_export(folder, [str(key.verifier)])
    assert found.ok and not found.whole and any("other sub-logs" in line for line in found.limits)


def test_an_older_head_does_not_hide_the_tail(
    make_source: Callable[..., Any], key: SigningKey, tmp_path: Path
) -> None:
    """A head proof of an earlier batch is genuine; in a whole export the root log shows the later one."""
    source = make_source()
    logs = source.logs
    opening = next(found for found in source.openings if found and found.name == "tenant/acme")
    index = source.openings.index(opening)
    from kvcustody.audit.tlog.proofs import inclusion_proof

    path = tuple(inclusion_proof(source._root, index, source._root.frontier.size))

    def older() -> Any:
        return [
            log._replace(head=opening.head, proof=type(log.proof)(opening, index, path, source.note))
            if log.name == "tenant/acme"
            else log
            for log in logs()
        ]

    source.logs = older
    write_export(tmp_path / "export", source, made_at_us=1)
    assert verify_export(tmp_path / "export", [str(key.verifier)]).problems == [
        "`tenant/acme` was cut: it had `300` leaves, and has 100"
    ]
    assert not lone_accepts(tmp_path / "export", str(key.verifier))


def test_two_histories_are_found_in_the_root_log(
    make_source: Callable[..., Any], key: SigningKey, tmp_path: Path
) -> None:
    """The holder of the signing key replaces a log between two batches: signed, and found."""
    source = make_source()
    changed = source.content["tenant/acme"]
    source.content["tenant/acme"] = [changed[0].replace(b"finish", b"finisb"), *changed[1:]]
    tiles = MemoryTiles(leaf_hashes(source.content["tenant/acme"]))
    source._tiles["tenant/acme"] = tiles
    forged = type(source)({**source.content}, key, batches=1)
    forged_opening = next(found for found in forged.openings if found and found.name == "tenant/acme")
    from kvcustody.audit.tlog.merkle import leaf_hash

    source._latest["tenant/acme"] = len(source.openings)
    source.openings.append(forged_opening)
    source.commitments.append(forged_opening.commitment())
    source._root.extend([leaf_hash(forged_opening.commitment())])
    from kvcustody.audit.tlog.root_log import root_checkpoint
    from kvcustody.audit.tlog.signing_key import sign_checkpoint

    source._note = sign_checkpoint(root_checkpoint(key.name, source._root.frontier.head()), [key])
    write_export(tmp_path / "export", source, made_at_us=1)
    problems = verify_export(tmp_path / "export", [str(key.verifier)]).problems
    assert len(problems) == 1 and "histor" in problems[0]
    assert not lone_accepts(tmp_path / "export", str(key.verifier))


def test_a_run_of_leaves_verifies_without_its_neighbours(
    make_source: Callable[..., Any], key: SigningKey, tmp_path: Path
) -> None:
    at = 1_700_000_000_000_000
    asked = ExportSelection(("tenant/acme",), at + 50_000, at + 90_000)
    write_export(tmp_path / "export", make_source(), asked, made_at_us=1, chunk_leaves=16)
    found = verify_export(tmp_path / "export", [str(key.verifier)])
    assert found.ok and [(log.first, log.end) for log in found.logs] == [(50, 90)]
    assert "leaves 50 to 90 of 300" in lone_says(tmp_path / "export", str(key.verifier)).stdout


def test_every_run_of_a_small_log_has_a_proof(make_source: Callable[..., Any]) -> None:
    from kvcustody.audit.exports.range_proof import range_proof
    from kvcustody.audit.tlog.proofs import ProofError

    hashes = leaf_hashes([b"%d" % number for number in range(20)])
    for size in range(1, 21):
        tiles = MemoryTiles(hashes[:size])
        head = tiles.frontier.head()
        for first in range(size + 1):
            for end in range(first, size + 1):
                proof = range_proof(tiles, first, end, size)
                right = proof.before.extend(hashes[first:end]).frontier
                proof.check(right, head)
                if end > first:
                    wrong = [*hashes[first : end - 1], hashes[0] if end > 1 else hashes[1]]
                    with pytest.raises(ProofError):
                        proof.check(proof.before.extend(wrong).frontier, head)


def test_purged_leaves_are_proved_by_their_hashes(
    make_source: Callable[..., Any], key: SigningKey, tmp_path: Path
) -> None:
    source = make_source(purged=5)
    write_export(tmp_path / "export", source, made_at_us=1)
    found = verify_export(tmp_path / "export", [str(key.verifier)])
    assert found.ok and {log.first for log in found.logs} == {5}
    assert lone_accepts(tmp_path / "export", str(key.verifier))


def test_a_head_kept_from_earlier(folder: Path, make_source: Callable[..., Any], key: SigningKey) -> None:
    leaves = make_source().content["tenant/acme"]
    head = Frontier().extend(leaf_hashes(leaves[:123])).frontier.head()
    vkey = str(key.verifier)
    assert verify_export(folder, [vkey], kept=[KeptHead("tenant/acme", head)]).ok
    for wrong in (TreeHead(123, bytes(32)), TreeHead(999, head.root)):
        assert not verify_export(folder, [vkey], kept=[KeptHead("tenant/acme", wrong)]).ok
        text = f"tenant/acme {wrong.size} {base64.b64encode(wrong.root).decode()}"
        assert lone_says(folder, vkey, "--head", text).returncode == 1
    text = f"tenant/acme {head.size} {base64.b64encode(head.root).decode()}"
    assert lone_says(folder, vkey, "--head", text).returncode == 0
    assert not verify_export(folder, [vkey], kept=[KeptHead("tenant/absent", head)]).ok


def test_a_witness_is_checked_by_both(folder: Path, key: SigningKey) -> None:
    witness = SigningKey.generate("witness.example", KeyKind.COSIGNATURE)
    vkeys, cosigner = [str(key.verifier)], str(witness.verifier)
    assert not verify_export(folder, vkeys, witnesses=[cosigner], witness_threshold=1).ok
    assert lone_says(folder, vkeys[0], "--witness", cosigner).returncode == 1
    note = (folder / "checkpoint").read_bytes()
    line = witness.sign(parse_note(note).text, at_seconds=1_700_000_000).line()
    (folder / "checkpoint").write_bytes(note + line.encode())
    found = verify_export(folder, vkeys, witnesses=[cosigner], witness_threshold=1)
    assert found.ok and NO_WITNESS not in found.limits
    said = lone_says(folder, vkeys[0], "--witness", cosigner)
    assert said.returncode == 0 and "signed at 1700000000" in said.stdout and "Split views" not in said.stdout


def test_an_interrupted_export_goes_on_where_it_was(
    make_source: Callable[..., Any], key: SigningKey, tmp_path: Path
) -> None:
    source = make_source()
    place = tmp_path / "export"

    def interrupt(log: str, done: int, total: int) -> None:
        if (log, done) == ("tenant/acme", 200):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_export(place, source, made_at_us=1, chunk_leaves=100, progress=interrupt)
    assert not place.exists()
    read: list[tuple[str, int]] = []
    leaves = source.leaves
    source.leaves = lambda name, first, end: read.append((name, first)) or leaves(name, first, end)
    write_export(place, source, made_at_us=1, chunk_leaves=100)
    assert ("tenant/acme", 200) in read and ("tenant/acme", 0) not in read
    assert verify_export(place, [str(key.verifier)]).ok
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_a_damaged_part_of_an_interrupted_export_is_not_kept(
    make_source: Callable[..., Any], key: SigningKey, tmp_path: Path
) -> None:
    source, place = make_source(), tmp_path / "export"

    def interrupt(log: str, done: int, total: int) -> None:
        if log == "tenant/acme":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_export(place, source, made_at_us=1, chunk_leaves=100, progress=interrupt)
    [file] = (tmp_path / ".export.partial" / "logs/000002").glob("*.ndjson")
    file.write_bytes(file.read_bytes().replace(b"finish", b"finisb", 1))
    with pytest.raises(ExportError):
        write_export(place, source, made_at_us=1, chunk_leaves=100)
    write_export(place, source, made_at_us=1, chunk_leaves=100)
    assert verify_export(place, [str(key.verifier)]).ok


def test_a_ledger_that_does_not_give_its_head_is_not_exported(
    make_source: Callable[..., Any], tmp_path: Path
) -> None:
    source = make_source()
    source.content["tenant/beta"][3] = b'{"kind":"x"}'
    with pytest.raises(ExportError, match="fsck"):
        write_export(tmp_path / "export", source, made_at_us=1)
    assert list(tmp_path.iterdir()) == []


def test_an_export_never_replaces_another(folder: Path, make_source: Callable[..., Any]) -> None:
    with pytest.raises(ExportError, match="there already"):
        write_export(folder, make_source(), made_at_us=1)


def test_spreadsheet_formulas_are_disarmed(make_source: Callable[..., Any], tmp_path: Path) -> None:
    write_export(tmp_path / "export", make_source(), form=LeafFormat.CSV, made_at_us=1)
    [path] = (tmp_path / "export/logs/000001").glob("*.csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["actor"] for row in rows} == {"'=cmd|'/c calc'!A0"}
    assert json.loads(rows[0]["leaf"])["actor"] == "=cmd|'/c calc'!A0"


@pytest.mark.parametrize("form", [LeafFormat.CSV, LeafFormat.PARQUET])
def test_traces_have_a_column_and_tables_from_before_it_are_read(form: LeafFormat, tmp_path: Path) -> None:
    said = [
        {"log": "tenant/acme", "at_us": 1, "kind": "receipt"} | more for more in ({}, {"trace": "ab" * 16})
    ]
    leaves = [json.dumps(each).encode() for each in said]
    path = tmp_path / "leaves"
    path.write_bytes(chunks.encode(form, "tenant/acme", 0, leaves))
    assert list(chunks.leaves_of(form, path)) == leaves
    if form is LeafFormat.CSV:
        rows = list(csv.reader(path.read_text().splitlines()))
        place = rows[0].index("trace")
        assert [row[place] for row in rows[1:]] == ["", "ab" * 16]
        before = tmp_path / "before.csv"
        with before.open("w", newline="") as file:
            csv.writer(file).writerows([*row[:place], *row[place + 1 :]] for row in rows)
        assert list(chunks.leaves_of(form, before)) == leaves


def test_a_manifest_cannot_lead_out_of_its_folder(folder: Path, key: SigningKey, tmp_path: Path) -> None:
    shutil.copytree(folder / "logs/000002", tmp_path / "outside")
    text = (folder / "manifest.json").read_text().replace("logs/000002", "../outside")
    (folder / "manifest.json").write_text(text)
    assert not verify_export(folder, [str(key.verifier)]).ok and not lone_accepts(folder, str(key.verifier))


def test_the_lone_verifier_imports_the_standard_library_alone() -> None:
    """RFC 8032's own vectors, and no module beyond Python's."""
    import ast

    source = Path(lone.__file__).read_text()
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    assert names <= set(sys.stdlib_module_names)
    public = bytes.fromhex("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c")
    signature = bytes.fromhex(
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )
    assert lone.ed25519_verifies(public, signature, b"\x72")
    assert not lone.ed25519_verifies(public, signature, b"\x73")
    assert not lone.ed25519_verifies(public, signature[:32] + bytes(32), b"\x72")


def plant(folder: Path, name: str) -> None:
    """Put something beside the export's own files that its manifest does not name."""
    genuine = next((folder / "logs/000002").glob("*.ndjson"))
    if name == "log":
        shutil.copytree(folder / "logs/000002", folder / "logs/000009")
    elif name == "leaves":
        (genuine.parent / "000000999999.ndjson").write_bytes(b'{"log":"tenant/acme","forged":true}\n')
    elif name == "tile":
        (folder / "tile/0").mkdir(parents=True)
        (folder / "tile/0/000").write_bytes(bytes(32))
    elif name == "hidden file":
        (folder / ".checkpoint").write_bytes(b"")
    elif name == "empty folder":
        (folder / "logs/000009").mkdir()
    elif name == "folder in the place of a file's name":
        (folder / "checkpoint.d").mkdir()
    elif name == "link to a file":
        (folder / "notes").symlink_to(folder / "checkpoint")
    elif name == "dangling link":
        (folder / "notes").symlink_to(folder / "nowhere")
    elif name == "linked file":
        genuine.rename(folder.parent / "leaves")
        genuine.symlink_to(folder.parent / "leaves")
    elif name == "linked folder":
        (folder / "logs/000002").rename(folder.parent / "log")
        (folder / "logs/000002").symlink_to(folder.parent / "log")
    elif name == "pipe":
        os.mkfifo(folder / "logs/pipe")


PLANTS = [
    "log",
    "leaves",
    "tile",
    "hidden file",
    "empty folder",
    "folder in the place of a file's name",
    "link to a file",
    "dangling link",
    "linked file",
    "linked folder",
    "pipe",
]


@pytest.mark.parametrize("name", PLANTS)
def test_what_the_manifest_does_not_name_is_refused_by_both(
    folder: Path, key: SigningKey, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forged log beside the real ones passed both; the control is the same folder with this one defence off."""
    assert verify_export(folder, [str(key.verifier)]).ok and lone_accepts(folder, str(key.verifier))
    plant(folder, name)
    assert not verify_export(folder, [str(key.verifier)]).ok
    assert not lone_accepts(folder, str(key.verifier))
    if not name.startswith("linked"):  # these have other defences too
        assert lone_says(folder, str(key.verifier)).returncode == 1
        monkeypatch.setattr(export_verifier, "strays", lambda *_: iter(()))
        monkeypatch.setattr(lone, "check_files", lambda *_: None)
        assert verify_export(folder, [str(key.verifier)]).ok and lone_accepts(folder, str(key.verifier))


@pytest.mark.parametrize("name", ["twice", "bytes", "leaves", "root", "origin"])
def test_what_the_manifest_states_has_to_agree(folder: Path, key: SigningKey, name: str) -> None:
    manifest = json.loads((folder / "manifest.json").read_bytes())
    file = manifest["logs"][1]["files"][-1]
    if name == "twice":
        manifest["logs"][1]["files"].append(file)
    elif name == "root":
        manifest["root"]["size"] += 1
    elif name == "origin":
        manifest["origin"] = "another.example/ledger"
    else:
        file[name] += 1
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert not verify_export(folder, [str(key.verifier)]).ok
    assert not lone_accepts(folder, str(key.verifier))


def test_a_draft_of_a_killed_try_is_not_exported(
    make_source: Callable[..., Any], key: SigningKey, tmp_path: Path
) -> None:
    source = make_source()

    def killed(log: str, done: int, total: int) -> None:
        if log != "system":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_export(tmp_path / "export", source, made_at_us=1, chunk_leaves=100, progress=killed)
    (tmp_path / ".export.partial/logs/.000.ndjson.0123456789abcdef.new").write_bytes(b"half")
    write_export(tmp_path / "export", source, made_at_us=1, chunk_leaves=100)
    assert verify_export(tmp_path / "export", [str(key.verifier)]).problems == []
    assert lone_accepts(tmp_path / "export", str(key.verifier))
