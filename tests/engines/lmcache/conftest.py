"""LMCache's real classes and server under governance. Without LMCache in the environment nothing here is collected."""

from __future__ import annotations

import importlib.util
from pathlib import Path

HERE = Path(__file__).resolve().parent
collect_ignore_glob = [] if importlib.util.find_spec("lmcache") else ["test_*.py"]

_spec = importlib.util.spec_from_file_location("vllm_fixtures", HERE.parent / "vllm" / "conftest.py")
assert _spec is not None and _spec.loader is not None
_fixtures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_fixtures)
site, model, engines, start, plain = (  # engines of vLLM, as its own tests have them
    getattr(_fixtures, name) for name in ("site", "model", "engines", "start", "plain")
)
