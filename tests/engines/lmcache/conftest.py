"""LMCache's real classes and server under governance. Without LMCache in the environment nothing here is collected."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "vllm")]
collect_ignore_glob = [] if importlib.util.find_spec("lmcache") else ["test_*.py"]
