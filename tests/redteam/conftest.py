"""Makes `two_worlds` and `occupancy_channel` importable from the cases beside it (the tests are no package)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "occupancy")]
