"""The one writer of files: whole or not at all, durable in this order, never open to more, nothing left behind."""

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvcustody import files
from kvcustody.console.erasure import command as certificates

Steps = list[tuple[str, str]]


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Steps]:
    """Which file in a folder was synced, renamed or linked, in order; other threads write elsewhere."""
    steps: Steps = []
    sync, link, replace = os.fsync, os.link, Path.replace

    def note(kind: str, path: Path) -> None:
        if path.is_relative_to(folder):
            steps.append((kind, path.name))

    def see_sync(descriptor: int) -> None:
        note("sync", Path(f"/proc/self/fd/{descriptor}").readlink())
        sync(descriptor)

    def see_link(source: Path, target: Path, **named: Any) -> None:
        note("place", Path(target))
        link(source, target, **named)

    def see_replace(source: Path, target: Path) -> Path:
        note("place", Path(target))
        return replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", see_sync)
        patch.setattr(os, "link", see_link)
        patch.setattr(Path, "replace", see_replace)
        yield steps


def in_order(steps: Steps, path: Path) -> bool:
    """Content, then name, then folder: what a power cut needs."""
    kinds = [kind for kind, _ in steps]
    return (
        kinds == ["sync", "place", "sync"]
        and steps[0][1].startswith(f".{path.name}.")
        and steps[1:] == [("place", path.name), ("sync", path.parent.name)]
    )


@pytest.mark.parametrize("exclusive", [False, True])
def test_content_then_name_then_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exclusive: bool) -> None:
    path = tmp_path / "certificate.json"
    with watched(monkeypatch, tmp_path) as steps:
        files.write_file(path, b"all of it", exclusive=exclusive)
    own = [step for step in steps if path.name in step[1] or step[1] == tmp_path.name]  # others sync files of theirs
    assert in_order(own, path), steps
    assert path.read_bytes() == b"all of it"
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


def test_a_writer_without_fsync_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "certificate.json"
    with watched(monkeypatch, tmp_path) as steps, monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        files.write_file(path, b"all of it")
    assert not in_order(steps, path)


@pytest.mark.parametrize("point", ["fsync", "link", "write"])
def test_a_failure_leaves_the_old_file_and_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    path = tmp_path / "key"
    exclusive = point == "link"
    if not exclusive:
        files.write_file(path, b"old")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, point, full)
        with pytest.raises(OSError, match="No space left"):
            files.write_file(path, b"new", exclusive=exclusive)
    assert [item.name for item in tmp_path.iterdir()] == ([] if exclusive else ["key"])
    assert exclusive or path.read_bytes() == b"old"


def test_a_block_that_fails_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), files.fresh_file(tmp_path / "tar") as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_call_that_takes_a_part_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write: Callable[[int, Any], int] = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: write(descriptor, bytes(data)[:3]))
        files.write_file(tmp_path / "note", b"0123456789")
    assert (tmp_path / "note").read_bytes() == b"0123456789"


def test_nobody_else_reads_it_even_while_it_is_written(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with files.fresh_file(tmp_path / "key") as file:
            file.write(b"secret")
            [draft] = tmp_path.iterdir()
            assert stat.S_IMODE(draft.stat().st_mode) == 0o600
            assert files.is_draft(draft)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


@pytest.mark.parametrize("there", ["file", "link"])
def test_exclusive_takes_no_name_that_is_taken(tmp_path: Path, there: str) -> None:
    path = tmp_path / "key"
    if there == "file":
        path.write_bytes(b"theirs")
    else:
        path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError):
        files.write_file(path, b"ours", exclusive=True)
    assert [item.name for item in tmp_path.iterdir()] == ["key"]


def test_a_link_is_replaced_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"kept")
    (tmp_path / "out").symlink_to(target)
    files.write_file(tmp_path / "out", b"new")
    assert target.read_bytes() == b"kept"
    assert not (tmp_path / "out").is_symlink()


def test_a_device_is_written_to_and_stays() -> None:
    files.write_file(Path("/dev/null"), b"gone")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


def test_drafts_of_killed_writers_go(tmp_path: Path) -> None:
    left = tmp_path / ".keys.json.0123456789abcdef.new"
    other = tmp_path / ".other.json.0123456789abcdef.new"
    for path in (left, other, tmp_path / "keys.json"):
        path.write_bytes(b"")
    files.discard_drafts(tmp_path / "keys.json")
    assert sorted(item.name for item in tmp_path.iterdir()) == [other.name, "keys.json"]


def test_a_folder_is_durable_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = tmp_path / ".export.partial"
    (draft / "logs").mkdir(parents=True)
    (draft / "logs" / "leaves").write_bytes(b"leaf")
    with watched(monkeypatch, tmp_path) as steps:
        files.publish_folder(draft, tmp_path / "export")
    assert {name for _, name in steps[:-1]} == {".export.partial", "logs", "leaves"}
    assert steps[-1] == ("sync", tmp_path.name)
    assert (tmp_path / "export" / "logs" / "leaves").read_bytes() == b"leaf"


def test_a_certificate_is_durable_when_its_command_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was renamed into its place without an fsync: a power cut could leave an empty certificate."""
    path = tmp_path / "certificate.json"
    with watched(monkeypatch, tmp_path) as steps:
        certificates._write(path, b"{}")
    assert in_order(steps, path), steps
