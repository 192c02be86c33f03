"""`kvcustody events`: keys are made once, credentials say what each may do, and what cannot work is refused."""

from __future__ import annotations

import json
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcustody.errors import ConfigError
from kvcustody.governance.settings import Settings
from kvcustody.integrations.jetstream.accounts import ACCOUNT, OPERATOR, USER, FleetKeys, NatsKey, read_credentials
from kvcustody.integrations.jetstream.command import app
from kvcustody.integrations.jetstream.connection import NatsPlace
from kvcustody.integrations.jetstream.keeper_process import StreamBounds
from kvcustody.integrations.jetstream.subjects import (
    READERS_API,
    name_in_subject,
    reader_permissions,
    worker_permissions,
)
from standins.integrations.jetstream.nats_server import BINARY
from standins.integrations.jetstream.told_world import epochs


def said(*words: str, fails: bool = False) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*words, *([] if fails else ["--json"])])
    if fails:
        assert isinstance(result.exception, ConfigError), result.output
        return {}
    assert result.exit_code == 0, result.output
    made: dict[str, Any] = json.loads(result.stdout)
    return made


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_keys_are_made_once_and_credentials_are_read_back(tmp_path: Path) -> None:
    folder = str(tmp_path / "nats")
    first = said("nats-config", "--folder", folder)
    again = said("nats-config", "--folder", folder, "--listen", "127.0.0.1:4333")
    assert (first["is_new"], again["is_new"]) == (True, False) and first["account"] == again["account"]
    text = Path(again["configuration"]).read_text()
    seeds = [(tmp_path / "nats" / f"{name}.seed") for name in ("operator", "fleet", "system")]
    assert all(mode(one) == 0o600 and one.read_text().strip() not in text for one in seeds)
    assert '"127.0.0.1:4333"' in text and "max_file_store: 0" in text
    made = said("credentials", "worker", "gpu-1", "--folder", folder, "--out", str(tmp_path / "w.creds"))
    found = read_credentials(tmp_path / "w.creds")
    assert mode(tmp_path / "w.creds") == 0o600 and found.name == made["name"] == "gpu-1"
    assert found.key.kind == USER and found.token.count(".") == 2
    if BINARY is not None:
        subprocess.run([BINARY, "-t", "-c", again["configuration"]], check=True, capture_output=True)


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    folder, out = str(tmp_path / "nats"), str(tmp_path / "x.creds")
    said("credentials", "worker", "w", "--folder", folder, "--out", out, fails=True)  # there are no keys
    said("nats-config", "--folder", folder)
    said("nats-config", "--folder", folder, "--tls-key", "k.pem", fails=True)
    for words in (
        ("worker", "w", "--tenant", "acme", "--issuer", "corp"),
        ("reader", "r", "--tenant", "acme"),
        ("reader", "r", "--tenant", "acme", "--issuer", "corp"),  # no control plane
        ("worker", "w", "--hours", "10000"),
    ):
        said("credentials", *words, "--folder", folder, "--out", out, fails=True)
    said("keep", fails=True)
    with pytest.raises(ConfigError):
        FleetKeys.create(tmp_path / "nats")
    with pytest.raises(ConfigError):
        NatsKey.from_seed("SUAXXXX")
    said("credentials", "door", "d", "--folder", folder, "--out", out)
    for url in ("nats://10.0.0.1:4222", "http://127.0.0.1:1", "127.0.0.1"):
        with pytest.raises(ConfigError):
            NatsPlace(url, Path(out)).check()
    with pytest.raises(ConfigError, match="unencrypted"):
        NatsPlace("nats://10.0.0.1:4222", Path(out), Path(folder) / "ca.pem").check()
    with pytest.raises(ConfigError, match="malformed"):
        NatsPlace("nats://[::1:4222", Path(out)).check()
    assert NatsPlace("tls://10.0.0.1:4222", Path(out)).check().name == "d"
    with pytest.raises(ValueError, match="erase epochs"):
        Settings(nats="nats://127.0.0.1:4222")


@pytest.mark.parametrize("kind", [OPERATOR, ACCOUNT, USER])
def test_a_keys_text_is_read_back_and_a_changed_one_is_not(kind: str) -> None:
    key = NatsKey.generate(kind)
    assert NatsKey.from_seed(key.seed) == key and key.seed.startswith(f"S{kind}") and key.public.startswith(kind)
    assert key.seed not in repr(key)
    changed = key.seed[:20] + ("A" if key.seed[20] != "A" else "B") + key.seed[21:]
    with pytest.raises(ConfigError):
        NatsKey.from_seed(changed)


def test_names_that_are_no_plain_words_do_not_widen_what_is_allowed() -> None:
    for name in ("a.b", "*", ">", "", "all", "x" * 65, "a b"):
        place = name_in_subject(name)
        assert place.isalnum() and place != "all" and name_in_subject(name) == place
    assert name_in_subject("gpu-1") == "gpu-1"
    allowed = worker_permissions(name_in_subject(">"))
    assert not any(one.endswith((">", "*")) for one in allowed["pub"]["allow"])
    own = reader_permissions("r", "aa")
    assert not any(one.startswith(("kv.", "$JS.", f"{READERS_API}.STREAM")) for one in own["pub"]["allow"])


def test_messages_live_no_longer_than_the_shortest_ceiling() -> None:
    bounds = StreamBounds(age_seconds_max=3600)
    assert bounds.age_seconds(None) == bounds.age_seconds(epochs(shortest_ceiling_us=None)) == 60
    assert bounds.age_seconds(epochs(shortest_ceiling_us=30_000_000)) == 30
    assert bounds.age_seconds(epochs(shortest_ceiling_us=10**12)) == 3600
