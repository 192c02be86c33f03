"""Dynamo's real router parts beside ours. Without Dynamo in the environment nothing here is collected."""

from __future__ import annotations

import importlib.util
import os

collect_ignore_glob = [] if importlib.util.find_spec("dynamo") else ["test_*.py"]
for name in ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST", "DYN_SYSTEM_HOST"):
    os.environ.setdefault(name, "127.0.0.1")  # else it binds every address
os.environ.setdefault("DYN_LOG", "error")
