"""Names of time zones: what is entered is known to every machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcustody import time_zones
from kvcustody.errors import ConfigError
from kvcustody.governance.service.settings import load_service_settings
from kvcustody.time_zones import check_zone, open_zone


@pytest.mark.parametrize("name", ["UTC", "Europe/Berlin", "Europe/Oslo", "America/New_York", "Etc/GMT+5"])
def test_names_of_zones_today_may_be_entered(name: str) -> None:
    check_zone(name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("US/Eastern", "write `America/New_York`"),
        ("Asia/Calcutta", "write `Asia/Kolkata`"),
        ("posixrules", "is not known here"),
        ("Factory", "is not known here"),
        ("europe/berlin", "is not known here"),
        ("../zoneinfo/UTC", "is not known here"),
        ("", "is not known here"),
    ],
)
def test_other_names_are_refused_where_they_are_entered(name: str, said: str) -> None:
    """Control: a former name still opens, for what was entered before."""
    with pytest.raises(ConfigError, match=said):
        check_zone(name)
    if said.startswith("write"):
        assert open_zone(name) is not None


@pytest.mark.parametrize(
    "given",
    [{"case_zone": "US/Eastern"}, {"time_zone": "US/Eastern"}, {"tenant_time_zones": {"a": "US/Eastern"}}],
)
def test_a_service_does_not_start_with_one(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="write `America/New_York`"):
        load_service_settings(**given)


def test_the_package_of_zones_says_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where the system has no data of zones; control: without any data every name that opens is taken."""
    monkeypatch.setattr(time_zones, "TZPATH", (str(tmp_path),))
    time_zones._names.cache_clear()
    try:
        with pytest.raises(ConfigError, match="write `America/New_York`"):
            check_zone("US/Eastern")
        monkeypatch.setattr(time_zones, "_data", lambda file: "")
        time_zones._names.cache_clear()
        check_zone("US/Eastern")
        with pytest.raises(ConfigError, match="is not known here"):
            check_zone("Nowhere/Land")
    finally:
        time_zones._names.cache_clear()
