"""LMCache's server with our serde: `python -m kvcustody.integrations.lmcache.server …`, as `lmcache server …`."""

from __future__ import annotations

import sys

from lmcache.cli.main import main

from kvcustody.integrations.lmcache.sealed_serde import register

if __name__ == "__main__":
    register()
    sys.argv = ["lmcache", "server", *sys.argv[1:]]
    sys.exit(main())
