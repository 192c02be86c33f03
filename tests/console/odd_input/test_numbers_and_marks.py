"""What people type and save: numbers that no ledger holds, digits of other scripts, files with a byte order mark."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

from kvcustody.audit.tlog.signed_note import KeyKind
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.audit.tlog.witness.client import read_addresses
from kvcustody.console.command_table import every_command
from kvcustody.console.main import app
from kvcustody.console.opening import key_texts
from kvcustody.governance.control_plane.opening import read_verifier_keys
from kvcustody.governance.release.trust import TrustFile, read_trust, write_trust
from kvcustody.governance.service.settings import load_service_settings

MARK = "\ufeff"
KEY = str(SigningKey.generate("kv.example/a").verifier)
ROWS = [
    (str(SigningKey.generate(role).verifier), role, None) for role in ("author", "approver", "operator", "break-glass")
]


@pytest.mark.parametrize(
    "line",
    [
        ["audit", "query", "--limit", str(1 << 64)],
        ["audit", "query", "--block", f"{'a' * 32}:²:1"],
        ["audit", "query", "--block", f"{'a' * 32}:1:{1 << 64}"],
        ["audit", "query", "--block", f"{'a' * 32}:١:1"],
        ["policy", "lint", "x.yaml", "--soon-days", str(1 << 70)],
    ],
)
def test_a_number_that_no_ledger_holds_is_refused_in_one_line(line: list[str], tmp_path: Path) -> None:
    """Control: the greatest number of 64 bits is one."""
    found = CliRunner().invoke(app, line)
    assert found.exit_code == 2 and "error:" in found.output, found.output
    assert "Traceback" not in found.output and len(found.output.strip().splitlines()) == 1
    control = CliRunner().invoke(
        app, ["audit", "query", "--limit", str((1 << 63) - 1), "--ledger", str(tmp_path / "x")]
    )
    assert "64 bits" not in control.output


def calls_with(kind: type, value: str) -> Iterator[list[str]]:
    """A call of every command with this value at each parameter of a kind, and 1 for whatever else is needed."""
    for name, command in every_command():
        known = inspect.signature(inspect.unwrap(command.callback), eval_str=True).parameters
        of_kind = [each for each in command.params if each.name in known and takes(kind, known[each.name].annotation)]
        for each in of_kind:
            line = name.split()
            for other in command.params:
                if other is each or other.required:
                    text = value if other is each else "1"
                    line.append(text if other.param_type_name == "argument" else f"{other.opts[0]}={text}")
            yield line


def takes(kind: type, annotation: Any) -> bool:
    return annotation is kind or any(takes(kind, part) for part in get_args(annotation))


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (int, str(1 << 64)),
        (int, "²"),
        (int, "1e3"),
        (int, "1_0"),
        (float, "inf"),
        (float, "nan"),
        (float, "²"),
    ],
)
def test_every_number_of_every_command_is_one_of_a_ledger(
    kind: type, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before the command begins; an operation of the API refuses the parts of its path itself."""
    monkeypatch.chdir(tmp_path)
    calls = sorted(calls_with(kind, value), key=lambda line: line[0] == "api")
    assert len(calls) > (60 if kind is int else 5)
    for line in calls:
        assert line[0] == "api" or not list(tmp_path.iterdir())
        found = CliRunner().invoke(app, line)
        assert found.exit_code == 2 and len(found.output.strip().splitlines()) == 1, (line, found.output)


@pytest.mark.parametrize("value", ["1_0", "+1", "010", "1.0", " 1", "1\n", "-0"])
def test_a_number_is_written_in_one_way(value: str, tmp_path: Path) -> None:
    """As in queries. Control: without the sign, the point or the space it is a number."""
    line = ["audit", "query", "--ledger", str(tmp_path / "x"), f"--limit={value}"]
    assert "not a whole number in decimal digits" in CliRunner().invoke(app, line).output
    assert "decimal digits" not in CliRunner().invoke(app, [*line[:-1], "--limit=1"]).output


def test_a_pool_or_a_crowd_that_no_machine_holds_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for option in ("--pool-blocks=1000000000000", "--tenants=1000000000000"):
        found = CliRunner().invoke(app, ["replay", "--limit=1", option])
        assert found.exit_code == 2 and len(found.output.strip().splitlines()) == 1, found.output


def test_files_with_a_byte_order_mark_are_read_as_without(tmp_path: Path) -> None:
    def saved(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(MARK + text, encoding="utf-8")
        return path

    assert key_texts([str(saved("a.pub", KEY + "\n"))]) == [KEY]
    assert [str(key) for key in read_verifier_keys(saved("ledger.keys", KEY))] == [KEY]
    witness = SigningKey.generate("witness.example", KeyKind.COSIGNATURE).verifier
    assert read_addresses(saved("witnesses", f"http://127.0.0.1:1/ {witness}"))
    holidays = saved("holidays", "2026-12-25 # Christmas\n")
    assert load_service_settings(case_holidays_path=holidays).case_calendar().texts() == ("2026-12-25",)
    trust = write_trust("prod", ROWS)
    assert read_trust(saved("trust.toml", trust)).audience == "prod"


def test_a_trust_configuration_is_read_again_when_its_file_has_changed(tmp_path: Path) -> None:
    """One that is none changes nothing. Control: an unchanged file gives the same object."""
    file = tmp_path / "trust.toml"
    file.write_text(write_trust("prod", ROWS))
    trust = TrustFile(file)
    first = trust.current()
    assert trust.current() is first and len(first.keys) == len(ROWS)
    other = str(SigningKey.generate("kv.example/b").verifier)
    file.write_text(write_trust("prod", [*ROWS, (other, "owner", "acme")]))
    assert set(trust.current().keys) == {*first.keys, "kv.example/b"}
    file.write_text("audience = ")
    assert set(trust.current().keys) == {*first.keys, "kv.example/b"}
