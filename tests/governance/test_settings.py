"""Settings: their sources in order and one-line errors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from kvcustody.errors import ConfigError
from kvcustody.governance.service.settings import ServiceSettings, load_service_settings
from kvcustody.governance.settings import (
    PREFIX,
    SERVICE_PREFIX,
    Settings,
    load_settings,
    refuse_misspelt,
    unknown_variables,
)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("KVCUSTODY_"):
            monkeypatch.delenv(name)


def test_every_setting_has_a_default_and_a_meaning() -> None:
    for name, field in Settings.model_fields.items():
        assert not field.is_required() and len(field.description or "") > 10, name
    assert load_settings().block_tokens == 16


def test_arguments_beat_environment_beats_file_beats_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toml = tmp_path / "kvcustody.toml"
    toml.write_text('block_tokens = 32\nscrub_batch_blocks = 7\nworker_name = "file"\nlog_format = "json"\n')
    monkeypatch.setenv("KVCUSTODY_CONFIG", str(toml))
    monkeypatch.setenv("KVCUSTODY_SCRUB_BATCH_BLOCKS", "8")
    monkeypatch.setenv("KVCUSTODY_WORKER_NAME", "environment")
    settings = load_settings(worker_name="argument")
    assert (settings.worker_name, settings.scrub_batch_blocks) == ("argument", 8)
    assert (settings.block_tokens, settings.log_format, settings.sweep_batch_residencies) == (32, "json", 128)


@pytest.mark.parametrize("suffix", ["yaml", "yml", "toml"])
def test_both_file_formats(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"settings.{suffix}"
    path.write_text("spill_bytes_max = '1MiB'\n" if suffix == "toml" else "spill_bytes_max: 1MiB\n")
    assert load_settings(path).spill_bytes_max == 1 << 20


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("block_tokens: many", "`block_tokens` input should be a valid integer"),
        ("block_tokens: 0", "`block_tokens` input should be greater than or equal to 1"),
        ("clean_reserve_share: 2", "`clean_reserve_share` input should be less than or equal to 1"),
        ("block_token: 16", "`block_token` unknown setting"),
        ("profile: open", "`profile` input should be 'shared', 'strict' or 'dedicated'"),
        ("database_url: hunter2", "`database_url` this is not a database URL"),
        ("database_url: mysql://u:hunter2@h/d", "`mysql` is neither SQLite nor PostgreSQL"),
        ("worker_name: Unknown", "`worker_name` `Unknown` is reserved for unnamed processes"),
        ("worker_name: 'a b'", "`worker_name` worker name: has the character U+0020"),
        ("{profile: strict, root_key_source: environment}", "refused in the strict profile"),
        ("- 1", "must be a mapping of settings"),
        ("a: [", "the YAML is not well-formed"),
        ("1: 2", "key `1` is an integer, not a name"),
        pytest.param(f"block_tokens: {'9' * 5000}", "settings file", id="a numeral that Python does not read"),
        ("worker_name: off", "1:14: KVP201 implicit boolean `off` is not allowed"),
        ("block_tokens: 010", "integer `010` is ambiguous"),
        ("block_tokens: 1:30", "sexagesimal number `1:30` is not allowed"),
        ("block_tokens: 1_6", "integer `1_6` is ambiguous"),
        ("clean_reserve_share: .5", "floating-point number `.5` is not allowed"),
        ("block_tokens: 16\nblock_tokens: 32", "2:1: KVP111 key `block_tokens` is already on line 1"),
        ("a: &a 1\nb: *a", "anchor `&a` is not allowed"),
        pytest.param("[" * 1000, "settings file", id="deep"),
    ],
)
def test_bad_files_give_one_line(tmp_path: Path, content: str, expected: str) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_settings(path)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value) and "hunter2" not in str(caught.value)


def test_a_file_of_the_service_is_read_by_the_same_reader(tmp_path: Path) -> None:
    path = tmp_path / "service.yaml"
    path.write_text("issuers: [{issuer: i, name: corp, audience: a, keys: k, leeway_seconds: 010}]")
    with pytest.raises(ConfigError, match="`010` is ambiguous"):
        load_service_settings(path)


def test_settings_keep_their_numbers_and_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    for name, text in (("a.yaml", "clean_reserve_share: 0.5"), ("a.toml", "clean_reserve_share = 0.5")):
        for mark in ("", "\ufeff"):
            (tmp_path / name).write_text(mark + text, encoding="utf-8")
            assert load_settings(tmp_path / name).clean_reserve_share == 0.5


def test_missing_and_malformed_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read \(No such file or directory\)"):
        load_settings(tmp_path / "absent.toml")
    (tmp_path / "bad.toml").write_bytes(b"\xff")
    (tmp_path / "odd.toml").write_text("a = ")
    (tmp_path / "long.toml").write_text(f"block_tokens = {'9' * 5000}")
    for name in ("bad.toml", "odd.toml", "long.toml"):
        with pytest.raises(ConfigError, match="settings file"):
            load_settings(tmp_path / name)


def test_the_database_password_is_never_shown() -> None:
    settings = load_settings(database_url="postgresql+psycopg://custody:hunter2@db/kv")
    assert "hunter2" not in repr(settings) + str(settings.shown()) + str(settings)
    assert settings.shown()["database_url"] == "postgresql+psycopg://custody:***@db/kv"


def test_unknown_variables_are_reported_and_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCUSTODY_SERVICES_HOST", "10.0.0.1")
    monkeypatch.setenv("KVCUSTODY_ROOT_KEY", "x")
    for name in ORCHESTRATED:
        monkeypatch.setenv(name, "tcp://10.0.0.1:80")
    load_settings()
    load_service_settings()
    assert unknown_variables() == (
        "KVCUSTODY_PORT",
        "KVCUSTODY_PORT_8080_TCP",
        "KVCUSTODY_PORT_8080_TCP_ADDR",
        "KVCUSTODY_SERVICES_HOST",
        "KVCUSTODY_TEAM",
        "KVCUSTODY_WORKER_SERVICE_HOST",
    )


ORCHESTRATED = (
    "KVCUSTODY_PORT",
    "KVCUSTODY_PORT_8080_TCP",
    "KVCUSTODY_PORT_8080_TCP_ADDR",
    "KVCUSTODY_SERVICE_HOST",
    "KVCUSTODY_SERVICE_PORT",
    "KVCUSTODY_SERVICE_PORT_HTTP",
    "KVCUSTODY_TEAM",
    "KVCUSTODY_WORKER_SERVICE_HOST",
)


def slips(name: str) -> Iterator[str]:
    """One letter wrong, missing, doubled or two exchanged, anywhere in the name."""
    for at, letter in enumerate(name):
        yield name[:at] + ("Z" if letter != "Z" else "Q") + name[at + 1 :]
        yield name[:at] + name[at + 1 :]
        yield name[:at] + letter + name[at:]
        yield name[:at] + name[at + 1 : at + 2] + letter + name[at + 2 :]


@pytest.mark.parametrize(
    ("prefix", "fields"),
    [(PREFIX, Settings.model_fields), (SERVICE_PREFIX, ServiceSettings.model_fields)],
)
def test_a_variable_that_is_close_to_a_setting_is_refused_with_its_name(prefix: str, fields: Iterable[str]) -> None:
    variables = {prefix + name.upper() for name in fields}
    for field in fields:
        name = field.upper()
        assert prefix + name in variables
        refuse_misspelt(variables, {prefix + name: "x", (prefix + name).lower(): "x"})
        if len(name) < 7:
            continue  # what is shorter is close to too much
        for slip in slips(name):
            if prefix + slip not in variables:
                with pytest.raises(ConfigError, match=r"did you mean `KVCUSTODY_"):
                    refuse_misspelt(variables, {prefix + slip: "x"})


def test_a_misspelt_variable_stops_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCUSTODY_BLOCK_TOKENZ", "4")
    said = "`KVCUSTODY_BLOCK_TOKENZ` is not a setting; did you mean `KVCUSTODY_BLOCK_TOKENS`?"
    with pytest.raises(ConfigError) as caught:
        load_settings()
    assert said in str(caught.value)
    load_service_settings()  # not its own
    monkeypatch.setattr("kvcustody.governance.settings.get_close_matches", lambda *_, **__: [])
    assert load_settings().block_tokens == 16  # the control: without the look it is ignored


def test_a_misspelt_variable_of_the_service_stops_its_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCUSTODY_SERVICE_LISTENS", "unix:here")
    with pytest.raises(ConfigError, match="did you mean `KVCUSTODY_SERVICE_LISTEN`"):
        load_service_settings()


def test_misspelt_arguments_and_names_in_a_file_have_a_suggestion(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("databse_url: x\n")
    loads: tuple[Callable[..., object], ...] = (load_settings, load_service_settings)
    for load in loads:
        with pytest.raises(ConfigError, match="`databse_url` unknown setting; did you mean `database_url`"):
            load(path)
        with pytest.raises(ConfigError, match="`databse_url` unknown setting; did you mean `database_url`"):
            load(databse_url="x")


def test_settings_do_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_settings().block_tokens = 4
