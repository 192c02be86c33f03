"""A worker in a process of its own that asks for one prompt again and again, and says of each what it reused.

    python -m standins.robust.leased_worker '{"worker_name": "gpu-0", ...}'

A line for each request on the error output, `reused HIT_TOKENS LEASE_IS_OVER`: the log has the other.
"""

from __future__ import annotations

import json
import os
import sys
import time

from kvcustody.governance.settings import Settings
from standins.service.control_plane_world import ask, opened


def main() -> None:
    """Until the process is ended."""
    with opened(Settings(**json.loads(sys.argv[1]))) as worker:
        governor = worker.governor
        while True:
            is_over = governor.custody.is_over(governor.clock.now_us())
            os.write(2, f"reused {ask(worker, 'holder', 'ann')} {int(is_over)}\n".encode())
            time.sleep(0.02)


if __name__ == "__main__":
    main()
