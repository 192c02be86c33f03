"""Where commands about a release look for the trust file, and what they say where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvcustody.console.main import app
from kvcustody.console.policy.release_options import TRUST, trust_file
from kvcustody.errors import ConfigError


def test_a_trust_file_is_looked_for_and_the_places_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    named = tmp_path / "own.toml"
    assert trust_file(named, "release") == named, "what is named is taken"
    with pytest.raises(ConfigError) as caught:
        trust_file(TRUST, "release")
    told = caught.value.message
    assert str(tmp_path / "trust.toml") in told and "policy_trust" in told and "--trust" in told
    assert "There is one" not in told
    (tmp_path / "release").mkdir()
    (tmp_path / "release" / "trust.toml").touch()
    with pytest.raises(ConfigError, match=r"There is one at `release/trust\.toml`: name it if you trust"):
        trust_file(TRUST, "release")
    config = tmp_path / "service.toml"
    config.write_text(f'policy_trust = "{named}"\n')
    monkeypatch.setenv("KVCUSTODY_SERVICE_CONFIG", str(config))
    assert trust_file(TRUST, "release") == named, "the service's own settings are the operator's"
    (tmp_path / "trust.toml").touch()
    assert trust_file(TRUST, "release") == TRUST
    shown = CliRunner().invoke(app, ["policy", "history", "--trust", "absent.toml"])
    assert shown.exit_code == 2 and "absent.toml" in shown.stderr
