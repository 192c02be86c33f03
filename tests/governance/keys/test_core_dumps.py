"""Core dumps of device memory are refused in strict and named elsewhere."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest
import structlog

from kvcustody.errors import ConfigError
from kvcustody.governance.keys.core_dumps import SWITCHES, disable_core_dumps


@pytest.mark.parametrize("switch", SWITCHES)
def test_strict_refuses_every_switch_that_is_on(switch):
    with pytest.raises(ConfigError, match=f"`{switch}` would write device memory"):
        disable_core_dumps(strict=True, environment={switch: "1"})


@pytest.mark.parametrize("switch", SWITCHES)
def test_elsewhere_it_is_named_in_the_log(switch):
    with structlog.testing.capture_logs() as logs:
        disable_core_dumps(strict=False, environment={switch: "1", "HOME": "1"})
    assert [line["switches"] for line in logs] == [(switch,)]


def test_a_switch_that_is_off_is_no_reason():
    with structlog.testing.capture_logs() as logs:
        disable_core_dumps(strict=False, environment=dict.fromkeys(SWITCHES, "0") | {"PATH": "x"})
    assert logs == []


@pytest.mark.parametrize(("strict", "soft"), [(True, 0), (False, 4096)])
def test_strict_writes_no_host_core_either(strict, soft):
    code = (
        "import resource\n"
        "from kvcustody.governance.keys.core_dumps import disable_core_dumps\n"
        "hard = resource.getrlimit(resource.RLIMIT_CORE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (4096, hard))\n"
        f"disable_core_dumps(strict={strict}, environment={{}})\n"
        "print(resource.getrlimit(resource.RLIMIT_CORE)[0])"
    )
    if resource.getrlimit(resource.RLIMIT_CORE)[1] not in (resource.RLIM_INFINITY, 4096):
        pytest.skip("this machine's hard limit is lower than the test's")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == soft


def test_a_worker_asks_before_it_opens_a_key(tmp_path, monkeypatch):
    from kvcustody.clock import SystemClock
    from kvcustody.governance.settings import Settings
    from kvcustody.governance.worker.open_foundation import open_foundation

    monkeypatch.setenv(SWITCHES[0], "1")
    settings = Settings(profile="strict", keyring_path=tmp_path / "keys.json", root_key_path=tmp_path / "root.key")
    with pytest.raises(ConfigError, match="would write device memory"):
        open_foundation(settings, SystemClock(), None, blocks=1, shards=1, bytes_per_block=1, device="cpu")
    assert not list(tmp_path.iterdir())
