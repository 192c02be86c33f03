"""Makes the worlds beside the cases importable (the tests are no package); one thread, because the models are tiny."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "batching"), str(HERE / "classic")]
torch.set_num_threads(1)  # more only wait for each other on a busy machine
