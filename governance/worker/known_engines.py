"""Which releases of an engine this kvcustody knows, where an adapter refuses others."""

from __future__ import annotations

VLLM_OLDEST = (0, 28)
VLLM_BELOW = (0, 34)
"""The first release that is not known yet."""
