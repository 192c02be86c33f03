"""A run of `kvcustody up` that is killed and started again, with every door compared with the leaves as it goes.

1. Erasures come in every state: the run's own are answered on time. One is asked for while no worker runs, past its
   deadline when the next process answers it; of two at the end nobody answers, and one of them is past its deadline.
2. What a run has to contain is looked up in its leaves (`Contents`): a comparison of nothing shows nothing.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx

from kvcustody.console.documents import ConsoleDocuments
from kvcustody.console.up.place import free_port, key_file, plane_settings
from kvcustody.console.web.app import Console
from kvcustody.governance.api.app import create_app
from kvcustody.governance.api.http.server import serve
from kvcustody.governance.service.service import open_service
from standins.audit.figure_doors import Shown, Site, show
from standins.audit.leaf_figures import LeafFigures, read_leaves
from standins.console.start_up import Started, start

_WAIT_SECONDS, _PAUSE_SECONDS = 240.0, 2.0
_BETWEEN_SECONDS = 60.0


class Contents(NamedTuple):
    """What a ledger has of what the comparison is about."""

    shared_blocks: int
    preempted_requests: int
    denied_requests: int
    processes: int
    erasures: tuple[str, ...]


def contents(leaves: LeafFigures) -> Contents:
    """What these leaves have."""
    crossed = leaves.crossed(0, 1 << 62).values()
    opened = [body for body in leaves.bodies if body["kind"] == "residency-opened"]
    return Contents(
        sum(blocks for _, blocks, _ in crossed),
        sum(int(body.get("earlier_blocks", 0)) > 0 for body in opened),
        sum(leaves.denials.values()),
        sum(body["kind"] == "worker-started" for body in leaves.bodies),
        tuple(sorted(set(leaves.erasures(time.time_ns() // 1000).values()))),
    )


def _has_reuse_and_denials(leaves: LeafFigures) -> bool:
    found = contents(leaves)
    return found.shared_blocks > 0 and found.denied_requests > 0


class ComparedRun:
    """One folder of `up`.

    `problems` are the figures that disagreed so far. `shown` is what every door said last, while requests ran and
    after.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "up"
        self._parent = folder
        self.database_url = f"sqlite:///{self.folder.resolve() / 'ledger.db'}"
        self.problems: list[str] = []
        self.shown: dict[str, list[Shown]] = {}
        self.compared: Counter[str] = Counter()

    def run(self, minutes: float) -> None:
        """The whole of it. Short of a minute it takes as long as it needs."""
        until = time.monotonic() + 60 * minutes
        started = self._start()
        self._await(lambda leaves: contents(leaves).shared_blocks > 0 and contents(leaves).denied_requests > 0)
        self._compare(started)
        started.end(signal.SIGKILL)
        with self._served() as site:
            self._erase(site, deadline_seconds=1)
        started = self._start()
        self._await(lambda leaves: "late" in contents(leaves).erasures)
        self._compare(started)
        while time.monotonic() + _BETWEEN_SECONDS < until:
            time.sleep(_BETWEEN_SECONDS)
            self._compare(started)
            if self.compared["while requests run"] % 8 == 0:
                assert started.end() == 0
                started = self._start()
        started.end(signal.SIGKILL)
        with self._served() as site:
            self._erase(site, deadline_seconds=1)
            self._erase(site, deadline_seconds=3600)
            self._keep("after", site)

    def _start(self) -> Started:
        return start(self._parent, "--folder", str(self.folder))

    def _await(self, holds: Callable[[LeafFigures], bool]) -> None:
        until = time.monotonic() + _WAIT_SECONDS
        while not holds(read_leaves(self.database_url)):
            assert time.monotonic() < until, contents(read_leaves(self.database_url))
            time.sleep(_PAUSE_SECONDS)

    def _compare(self, started: Started) -> None:
        url = str(started.said["url"]).removesuffix("/console/")
        self._keep("while requests run", Site(url, self._key("you"), self.database_url))
        assert started.process.poll() is None

    def _keep(self, when: str, site: Site) -> None:
        self.shown[when] = show(site)
        self.compared[when] += 1
        self.problems += [f"{when}: {each}" for shown in self.shown[when] for each in shown.differences()]

    def _key(self, name: str) -> str:
        return key_file(self.folder, name).read_text()

    @contextmanager
    def _served(self) -> Iterator[Site]:
        """The service on the folder, without a worker."""
        settings = plane_settings(self.folder.resolve(), free_port())
        ready = threading.Event()
        with open_service(settings, documents=ConsoleDocuments()) as service:
            application = create_app(service, pages=Console(service))
            thread = threading.Thread(target=serve, args=(service,), kwargs={"app": application, "ready": ready.set})
            thread.start()
            try:
                assert ready.wait(60)
                yield Site(f"http://{settings.listen}", self._key("you"), self.database_url)
            finally:
                service.stopping.set()
                thread.join(60)

    def _erase(self, site: Site, *, deadline_seconds: int) -> None:
        """Ask for the erasure of one subject of a tenant that has records."""
        headers = {
            "Authorization": f"Bearer {self._key('dpo-desk')}",
            "Idempotency-Key": f"erase-{time.time_ns()}",
        }
        body = {"tenant": "acme", "subject": "user-0", "deadline_seconds": deadline_seconds}
        answer = httpx.post(f"{site.url}/v1/erasures", headers=headers, json=body, timeout=60)
        assert answer.status_code == 202, answer.text
