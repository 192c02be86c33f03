"""Makes the worlds beside the cases importable (the tests are no package); one thread, because the models are tiny."""

from __future__ import annotations

from pathlib import Path

import torch

from standins.engines.releases.tried_release import widen

widen("transformers")
HERE = Path(__file__).parent
torch.set_num_threads(1)  # more only wait for each other on a busy machine
