"""What every test finds: logs on stderr, and a ledger that is migrated already, to be copied."""

from __future__ import annotations

import atexit
import gc
import json
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import structlog

pytest_plugins = ["standins.forks"]
TEMPORARY_BYTES_MAX = 4 << 30  # a whole run writes 2 GB, and removes what a test that passed wrote


def pytest_configure(config: pytest.Config) -> None:
    """The same examples every time, and none judged by the clock: a failure is the change's. A soak draws anew.

    Temporary files lie in memory where they fit, so that no test waits for the disk.
    """
    from standins.memory_folder import MEMORY, has_room

    if has_room(TEMPORARY_BYTES_MAX):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
    gc.disable()  # modules and items live to the end: the collector would look at all of them again and again
    if config.option.markexpr != "soak" and find_spec("hypothesis"):  # which an engine's environment has not
        from hypothesis import settings

        settings.register_profile("repeatable", derandomize=True, deadline=None)
        settings.load_profile("repeatable")


@pytest.hookimpl(tryfirst=True)  # before marks are selected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _leave_twins_to_the_system_tests(items)
    seed = os.environ.get("KVCUSTODY_TEST_ORDER")
    if seed is not None:
        _shuffle(items, int(seed))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    gc.set_threshold(10_000, 20, 20)


def pytest_unconfigure() -> None:
    atexit.register(gc.unfreeze)  # libraries look for what they left, when pytest has collected ten times


def _leave_twins_to_the_system_tests(items: list[pytest.Item]) -> None:
    """Suites outside `tests/databases.json` run on SQLite alone in `make test`."""
    twins = [item for item in items if _database_of(item) == "postgresql"]
    if not twins or "KVCUSTODY_DATABASE_BRANCHES" in os.environ:
        return
    from standins.database_branches import TESTS, read_table

    suites = read_table().suites
    for item in twins:
        if str(item.path.relative_to(TESTS)) not in suites:
            item.add_marker(pytest.mark.system("a statement of this suite that PostgreSQL alone refuses"))


def _database_of(item: pytest.Item) -> str:
    call = getattr(item, "callspec", None)
    return str(call.params.get("any_store", "")) if call is not None else ""


def _shuffle(items: list[pytest.Item], seed: int) -> None:
    """Another order of the files, and of the tests in each (`tests/loaded.py`).

    Tests that share a module's fixture leave its state to the next, so among themselves they keep their order.
    """
    by_file: dict[Path, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.path, []).append(item)
    chance = random.Random(seed)
    files = list(by_file.values())
    chance.shuffle(files)
    items.clear()
    for tests in files:
        shared = iter([item for item in tests if _shares(item)])
        chance.shuffle(tests)
        items += [next(shared) if _shares(item) else item for item in tests]


def _shares(item: pytest.Item) -> bool:
    """Whether a test has a fixture that other tests of its file have too."""
    assert isinstance(item, pytest.Function)
    used = item._fixtureinfo.name2fixturedefs.values()
    return any(fixture.scope in ("class", "module", "package") for each in used for fixture in each)


def _log_to_stderr() -> None:
    """A service in this process logs beside what a command prints on stdout."""
    structlog.reset_defaults()
    structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))


_log_to_stderr()


@pytest.fixture(autouse=True)
def unconfigured_logs() -> Iterator[None]:
    yield
    _log_to_stderr()
    logger = sys.modules.get("kvcustody.logger")
    if logger is not None:
        logger.configure_logging(lambda: None)  # what a test asked for, and nothing was logged by


@pytest.fixture(scope="module", autouse=True)
def ended_guards() -> Iterator[None]:
    """A worker or service that a file leaves open fails it: its threads fail later, in the tests of other files.

    Not so threads that end by themselves: when the answer that they wait for comes, or when nothing refers to their
    owner any more.
    """
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if isinstance(thread, threading.Timer):
            thread.cancel()  # what it would record or log a minute later belongs to no test any more
    module = sys.modules.get("kvcustody.guarding_thread")
    if module is None or not (left := _guards(module.GuardingThread) - before):
        return
    gc.collect()
    for thread in left:
        thread.join(5)
    assert not (names := [thread.name for thread in left if thread.is_alive()]), f"left open: {names}"


def _guards(kind: type[threading.Thread]) -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if isinstance(thread, kind) and not thread._holds_question}


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite ledger with this program's schema and nothing in it: a copy is a new ledger in a millisecond."""
    from kvcustody.audit.store.database.engine import open_store
    from kvcustody.migrations.upgrade import upgrade

    path = tmp_path_factory.mktemp("migrated") / "ledger.db"
    engine = open_store(path)
    upgrade(engine)
    engine.dispose()
    return path


@pytest.fixture
def store(tmp_path: Path, migrated: Path) -> Iterator[Any]:
    from standins.builders import ledger

    with ledger(migrated, tmp_path / "ledger.db") as engine:
        yield engine


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the run's PostgreSQL server."""
    from standins.forks import FORK
    from standins.postgres import shared_server

    folder = tmp_path_factory.getbasetemp()
    with shared_server(folder.parent if FORK in os.environ else folder) as address:
        yield address


@pytest.fixture
def postgres_store(postgres: str) -> Iterator[Any]:
    from standins.postgres import new_ledger

    with new_ledger(postgres, timeout_seconds=0.3) as engine:
        yield engine


@pytest.fixture(params=["sqlite", "postgresql"])
def any_store(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Both databases, one after the other (`tests/databases.json`)."""
    from standins import database_branches

    began = time.monotonic()
    with database_branches.recorded() as entered:
        yield request.getfixturevalue("store" if request.param == "sqlite" else "postgres_store")
    suite = str(request.path.relative_to(database_branches.TESTS))
    record_to = os.environ.get("KVCUSTODY_DATABASE_BRANCHES")
    if record_to is None:
        database_branches.check(suite, entered, database_branches.read_table())
        return
    line = {"suite": suite, "branches": sorted(entered), "seconds": time.monotonic() - began}
    with (Path(record_to) / f"{os.getpid()}").open("a") as file:
        file.write(json.dumps(line) + "\n")
