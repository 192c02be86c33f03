"""Processes of a fleet on this machine: what is found, what is waited for, and what is said of one that ends."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from kvcustody.errors import ConfigError
from kvcustody.lab.fleet.local_processes import LocalProcesses, free_ports
from kvcustody.lab.fleet.router_programs import ROUTERS, find_program, router_command

SERVER = """
import http.server, sys
address = ("127.0.0.1", int(sys.argv[1]))
http.server.HTTPServer(address, http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def test_one_that_answers_is_waited_for_and_ended(tmp_path: Path) -> None:
    [port] = free_ports(1)
    with LocalProcesses(tmp_path / "logs") as processes:
        pid = processes.start("server", [sys.executable, "-c", SERVER, str(port)], folder=tmp_path)
        processes.wait_for("server", f"http://127.0.0.1:{port}/", seconds=30)
        os.kill(pid, 0)
        stop = threading.Event()
        stop.set()
        with pytest.raises(KeyboardInterrupt):
            processes.wait_for("server", f"http://127.0.0.1:{port}/nothing", stop=stop)
        with pytest.raises(ConfigError, match="does not answer"):
            processes.wait_for("server", f"http://127.0.0.1:{port}/nothing", seconds=0.0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_one_that_ends_by_itself_says_its_last_words(tmp_path: Path) -> None:
    with LocalProcesses(tmp_path) as processes:
        processes.start("bad", [sys.executable, "-c", "raise ValueError('no such thing')"])
        with pytest.raises(ConfigError, match=r"`bad` has ended with 1: ValueError: no such thing"):
            processes.wait_for("bad", "http://127.0.0.1:9/", seconds=30)
    with pytest.raises(ConfigError, match="does not start"):
        processes.start("none", ["/nowhere/program"])


def test_a_program_is_found_in_a_folder_first(tmp_path: Path) -> None:
    assert find_program("smg-of-nobody") is None
    (tmp_path / "smg-of-nobody").touch()
    assert find_program("smg-of-nobody", [tmp_path]) == tmp_path / "smg-of-nobody"


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_gets_the_flags_of_its_page(name: str) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "reference" / "routers" / f"{name}.md").read_text()
    command = router_command(name, Path("/bin/router"), ["http://w1"], port=1, metrics_port=2, is_bounded=True)
    flags = [word for word in ROUTERS[name].bounds if word.startswith("--")]
    assert flags and all(flag in page and flag in command for flag in flags)
    assert command[command.index("--worker-urls") + 1] == "http://w1"
