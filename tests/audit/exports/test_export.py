"""Exports verify unless they were changed, and three verifiers agree on it (`verifiers`)."""

from __future__ import annotations

import ast
import base64
import csv
import hashlib
import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcustody.audit.exports import amalgamate
from kvcustody.audit.exports import file_formats as chunks
from kvcustody.audit.exports.export_writer import ExportSelection, write_export
from kvcustody.audit.exports.file_formats import LeafFormat
from kvcustody.audit.leaf.merkle import Frontier, TreeHead, leaf_hashes
from kvcustody.audit.tlog.proofs import MemoryTiles
from kvcustody.audit.tlog.signed_note import CannotCheckError, KeyKind, parse_note
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.audit.tlog.tiles import ExportError
from kvcustody.audit.verify import verify_export as export_verifier
from kvcustody.audit.verify.verify_export import NO_WITNESS, KeptHead
from kvcustody.console.main import app
from standins.audit.verifiers import ALONE, is_sound, run_alone, verify_both

FORMS = list(LeafFormat)


@pytest.fixture
def folder(make_source: Callable[..., Any], tmp_path: Path) -> Path:
    write_export(tmp_path / "export", make_source(), made_at_us=1, chunk_leaves=100)
    return tmp_path / "export"


@pytest.mark.parametrize("form", FORMS)
def test_an_export_verifies_by_a_public_key_alone(
    make_source: Callable[..., Any], key: SigningKey, tmp_path: Path, form: LeafFormat
) -> None:
    source = make_source()
    made = write_export(tmp_path / "export", source, form=form, made_at_us=1, chunk_leaves=100)
    check = export_verifier.verify_export if form is LeafFormat.PARQUET else verify_both
    verdict = check(tmp_path / "export", [str(key.verifier)])
    assert verdict.problems == [] and verdict.whole and verdict.leaves == made.leaves == 348
    assert {log.name: log.kinds.total() for log in verdict.logs} == {
        "system": 7,
        "tenant/acme": 300,
        "tenant/beta": 41,
    }
    assert NO_WITNESS in verdict.limits
    said = run_alone(tmp_path / "export", str(key.verifier))
    if form is LeafFormat.PARQUET:
        assert said.returncode == 2 and "audit verify" in said.stdout
    else:
        assert said.returncode == 0 and "SOUND: 348 leaves" in said.stdout and "split views" in said.stdout, said


def test_what_cannot_be_checked_here_has_no_verdict(
    make_source: Callable[..., Any], key: SigningKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without pyarrow, or with a key that is none, nothing is called sound, nor not sound: exit status 2."""
    place, vkey = tmp_path / "export", str(key.verifier)
    write_export(place, make_source(), form=LeafFormat.PARQUET, made_at_us=1)
    assert CliRunner().invoke(app, ["audit", "verify", str(place), "--key", vkey]).exit_code == 0
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(CannotCheckError, match="pyarrow"):
        export_verifier.verify_export(place, [vkey])
    told = CliRunner().invoke(app, ["audit", "verify", str(place), "--key", vkey])
    assert told.exit_code == 2 and "sound" not in told.stdout
    for wrong in ("no key", vkey.replace("+", "-")):
        assert ALONE.main([str(place), "--key", wrong]) == 2
    assert ALONE.main([str(tmp_path / "absent"), "--key", vkey]) == 1


def test_another_key_verifies_nothing(folder: Path) -> None:
    other = str(SigningKey.generate("ledger.example/test").verifier)
    assert not verify_both(folder, [other]).ok
    assert run_alone(folder, other).returncode == 1


def test_no_byte_of_an_export_can_be_changed(folder: Path, key: SigningKey, tmp_path: Path) -> None:
    """A seeded sample of single-byte edits over all files that carry evidence: all verifiers refuse each."""
    chance = random.Random(4)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    evidence = [path for path in files if path.name not in ("verify_kvcustody.py", "manifest.json")]
    survived: list[tuple[str, int]] = []
    for _ in range(60):
        path = chance.choice(evidence)
        data = path.read_bytes()
        at = chance.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1 :])
        if is_sound(folder, str(key.verifier)):
            survived.append((path.name, at))
        path.write_bytes(data)
    assert survived == [] and is_sound(folder, str(key.verifier))


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
    digest = hashlib.sha256(data).hexdigest()
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
    assert is_sound(folder, str(key.verifier))  # the positive control: the rewriting itself is accepted
    rewrite(folder, CHANGES[name])
    assert not is_sound(folder, str(key.verifier))


def test_a_sub_log_cannot_be_left_out_of_a_whole_export(folder: Path, key: SigningKey) -> None:
    manifest = json.loads((folder / "manifest.json").read_bytes())
    shutil.rmtree(folder / manifest["logs"].pop(0)["folder"])
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert verify_both(folder, [str(key.verifier)]).problems == ["log `system` was left out"]
    assert "left out" in run_alone(folder, str(key.verifier)).stdout
    manifest["openings"] = False  # then it is an export of a part, and says so
    (folder / "root.ndjson").unlink()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    found = verify_both(folder, [str(key.verifier)])
    assert found.ok and not found.whole and any("other sub-logs" in line for line in found.limits)


def test_an_older_head_does_not_hide_the_tail(make_source: Callable[..., Any], key: SigningKey, tmp_path: Path) -> None:
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
    assert verify_both(tmp_path / "export", [str(key.verifier)]).problems == [
        "`tenant/acme` was cut: it had `300` leaves, and has 100"
    ]


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
    from kvcustody.audit.leaf.merkle import leaf_hash

    source._latest["tenant/acme"] = len(source.openings)
    source.openings.append(forged_opening)
    source.commitments.append(forged_opening.commitment())
    source._root.extend([leaf_hash(forged_opening.commitment())])
    from kvcustody.audit.tlog.root_log import root_checkpoint
    from kvcustody.audit.tlog.signing_key import sign_checkpoint

    source._note = sign_checkpoint(root_checkpoint(key.name, source._root.frontier.head()), [key])
    write_export(tmp_path / "export", source, made_at_us=1)
    problems = verify_both(tmp_path / "export", [str(key.verifier)]).problems
    assert len(problems) == 1 and "histor" in problems[0]


def test_a_run_of_leaves_verifies_without_its_neighbours(
    make_source: Callable[..., Any], key: SigningKey, tmp_path: Path
) -> None:
    at = 1_700_000_000_000_000
    asked = ExportSelection(("tenant/acme",), at + 50_000, at + 90_000)
    write_export(tmp_path / "export", make_source(), asked, made_at_us=1, chunk_leaves=16)
    found = verify_both(tmp_path / "export", [str(key.verifier)])
    assert found.ok and [(log.first, log.end) for log in found.logs] == [(50, 90)]
    assert "leaves 50 to 90 of 300" in run_alone(tmp_path / "export", str(key.verifier)).stdout


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
    found = verify_both(tmp_path / "export", [str(key.verifier)])
    assert found.ok and {log.first for log in found.logs} == {5}


def test_a_head_kept_from_earlier(folder: Path, make_source: Callable[..., Any], key: SigningKey) -> None:
    leaves = make_source().content["tenant/acme"]
    head = Frontier().extend(leaf_hashes(leaves[:123])).frontier.head()
    vkey = str(key.verifier)
    assert verify_both(folder, [vkey], kept=[KeptHead("tenant/acme", head)]).ok
    for wrong in (TreeHead(123, bytes(32)), TreeHead(999, head.root)):
        assert not verify_both(folder, [vkey], kept=[KeptHead("tenant/acme", wrong)]).ok
        text = f"tenant/acme {wrong.size} {base64.b64encode(wrong.root).decode()}"
        assert run_alone(folder, vkey, "--head", text).returncode == 1
    text = f"tenant/acme {head.size} {base64.b64encode(head.root).decode()}"
    assert run_alone(folder, vkey, "--head", text).returncode == 0
    assert not verify_both(folder, [vkey], kept=[KeptHead("tenant/absent", head)]).ok


def test_a_witness_is_checked_by_both(folder: Path, key: SigningKey) -> None:
    witness = SigningKey.generate("witness.example", KeyKind.COSIGNATURE)
    vkeys, cosigner = [str(key.verifier)], str(witness.verifier)
    assert not verify_both(folder, vkeys, witnesses=[cosigner], witness_threshold=1).ok
    assert run_alone(folder, vkeys[0], "--witness", cosigner).returncode == 1
    note = (folder / "checkpoint").read_bytes()
    line = witness.sign(parse_note(note).text, at_seconds=1_700_000_000).line()
    (folder / "checkpoint").write_bytes(note + line.encode())
    found = verify_both(folder, vkeys, witnesses=[cosigner], witness_threshold=1)
    assert found.ok and NO_WITNESS not in found.limits
    said = run_alone(folder, vkeys[0], "--witness", cosigner)
    assert said.returncode == 0 and "signed at 1700000000" in said.stdout and "split views" not in said.stdout


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
    assert verify_both(place, [str(key.verifier)]).ok
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
    assert verify_both(place, [str(key.verifier)]).ok


def test_a_ledger_that_does_not_give_its_head_is_not_exported(make_source: Callable[..., Any], tmp_path: Path) -> None:
    source = make_source()
    source.content["tenant/beta"][3] = b'{"kind":"x"}'
    with pytest.raises(ExportError, match="fsck"):
        write_export(tmp_path / "export", source, made_at_us=1)
    assert list(tmp_path.iterdir()) == []


def test_an_export_never_replaces_another(folder: Path, make_source: Callable[..., Any]) -> None:
    with pytest.raises(ExportError, match="exists already"):
        write_export(folder, make_source(), made_at_us=1)


def test_spreadsheet_formulas_are_disarmed(make_source: Callable[..., Any], tmp_path: Path) -> None:
    write_export(tmp_path / "export", make_source(), form=LeafFormat.CSV, made_at_us=1)
    [path] = (tmp_path / "export/logs/000001").glob("*.csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["actor"] for row in rows} == {"'=cmd|'/c calc'!A0"}
    assert json.loads(rows[0]["leaf"])["actor"] == "=cmd|'/c calc'!A0"


@pytest.mark.parametrize("form", [LeafFormat.CSV, LeafFormat.PARQUET])
def test_traces_have_a_column(form: LeafFormat, tmp_path: Path) -> None:
    said = [{"log": "tenant/acme", "at_us": 1, "kind": "receipt"} | more for more in ({}, {"trace": "ab" * 16})]
    leaves = [json.dumps(each).encode() for each in said]
    path = tmp_path / "leaves"
    path.write_bytes(chunks.encode(form, "tenant/acme", 0, leaves))
    assert list(chunks.leaves_of(form, path)) == leaves
    if form is LeafFormat.CSV:
        rows = list(csv.reader(path.read_text().splitlines()))
        place = rows[0].index("trace")
        assert [row[place] for row in rows[1:]] == ["", "ab" * 16]


def test_a_manifest_cannot_lead_out_of_its_folder(folder: Path, key: SigningKey, tmp_path: Path) -> None:
    shutil.copytree(folder / "logs/000002", tmp_path / "outside")
    text = (folder / "manifest.json").read_text().replace("logs/000002", "../outside")
    (folder / "manifest.json").write_text(text)
    assert not is_sound(folder, str(key.verifier))


def test_the_stand_alone_verifier_is_made_of_the_library_and_imports_pythons_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = amalgamate.make_standalone()
    assert program == (folder / "verify_kvcustody.py").read_bytes()
    imported = {node.name for node in ast.walk(ast.parse(program)) if isinstance(node, ast.alias)}
    modules = {node.module for node in ast.walk(ast.parse(program)) if isinstance(node, ast.ImportFrom)}
    assert {str(name).split(".")[0] for name in modules} <= set(sys.stdlib_module_names)
    assert not imported & {"orjson", "cryptography", "pyarrow", "kvcustody"}
    text = Path(export_verifier.__file__).read_text()
    body = text[text.index("class _Check:") : text.index("class DueHeads:")].rstrip()
    assert body in program.decode(), "byte for byte"
    # The control: the library as it stands would need packages.
    monkeypatch.setattr(amalgamate, "SUBSTITUTES", {})
    with pytest.raises(amalgamate.AmalgamationError, match=r"orjson|cryptography"):
        amalgamate.make_standalone()


def test_two_statements_of_one_name_are_not_put_into_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    places = amalgamate._defined
    monkeypatch.setattr(
        amalgamate, "_defined", lambda node: {"check"} if isinstance(node, ast.FunctionDef) else places(node)
    )
    with pytest.raises(amalgamate.AmalgamationError, match="`check` is defined in"):
        amalgamate.make_standalone()


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
def test_what_the_manifest_does_not_name_is_refused(
    folder: Path, key: SigningKey, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forged log beside the real ones passed; the control is the same folder with this one defence off."""
    assert is_sound(folder, str(key.verifier))
    plant(folder, name)
    assert not is_sound(folder, str(key.verifier))
    if not name.startswith("linked"):  # these have other defences too
        assert run_alone(folder, str(key.verifier)).returncode == 1
        monkeypatch.setattr(export_verifier, "strays", lambda *_: iter(()))
        monkeypatch.setattr(ALONE, "strays", lambda *_: iter(()))
        assert verify_both(folder, str(key.verifier)).ok


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
    assert not is_sound(folder, str(key.verifier))


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
    assert verify_both(tmp_path / "export", [str(key.verifier)]).problems == []
