"""Mooncake's real master and clients on loopback. Without Mooncake in the environment nothing here is collected."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("mooncake") else ["test_*.py"]
