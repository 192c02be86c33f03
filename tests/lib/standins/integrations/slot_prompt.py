"""The prompt that cases of slots begin with."""

from __future__ import annotations

PROMPT = list(range(1, 14))
