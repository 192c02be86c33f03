"""LMCache's own server with our adapter and module, by itself, on each release that is supported."""

from __future__ import annotations

import urllib.request
from importlib.util import find_spec
from pathlib import Path
from urllib.error import HTTPError

import pytest

from standins.engines.lmcache.lmcache_server import GOVERNED, OURS, LMCacheServer
from standins.engines.lmcache.lmcache_site import Site


def test_a_governed_server_shows_its_module_and_asks_for_its_key(tmp_path: Path) -> None:
    site = Site(tmp_path / "site")
    server = LMCacheServer(site.folder / "lmcache", site.of_server())
    try:
        assert "kvcustody_first_tier" in str(server.status())
        if find_spec("lmcache.security") is not None:  # from 0.5.7 on
            with pytest.raises(HTTPError, match="401"):
                urllib.request.urlopen(f"http://127.0.0.1:{server.http}/status", timeout=10)
    finally:
        server.close()


def test_a_first_tier_that_keeps_what_it_has_does_not_start(tmp_path: Path) -> None:
    """The control: the module is asked on each release, and refuses."""
    site = Site(tmp_path / "site")
    with pytest.raises(AssertionError, match="skip_l1"):
        LMCacheServer(site.folder / "lmcache", site.of_server(), OURS, *GOVERNED[2:])
