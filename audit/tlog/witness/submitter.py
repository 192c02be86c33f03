"""Submit every new checkpoint to the witnesses, in the background.

1. Each witness has a thread of its own: one that is dead, slow or lying delays no other, no commit and no signature.
2. A failure is tried again after a wait that doubles up to a limit, with chance in it. What a witness missed is
   covered by the next checkpoint that it signs.
3. A line is stored only after it verified under the configured key. A witness that remembers a longer log than ours
   is evidence of a cut or restored ledger: `status()` says so and nothing hides it.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sqlalchemy import Engine, func, insert, select
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from kvcustody.audit.store.database.engine import WRITE, describe
from kvcustody.audit.store.schema.retention import cosignatures
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.tlog.witness.client import Cosigned, WitnessAddress, cosign
from kvcustody.errors import LedgerError
from kvcustody.guarding_thread import GuardingThread

_WAIT_SECONDS_MAX = 300.0
_JITTER = random.SystemRandom()


class SubmitterStatus(NamedTuple):
    """The progress of one witness, by its thread; `problem` is why it is behind (empty: it is not)."""

    name: str
    size: int
    failures: int
    problem: str


class WitnessSubmitter:
    """Submits one ledger's checkpoints; `start` and `close` run it."""

    def __init__(
        self,
        engine: Engine,
        addresses: Sequence[WitnessAddress],
        *,
        interval_seconds: float = 5.0,
        timeout_seconds: float = 5.0,
    ) -> None:
        self._engine = engine
        self._addresses = tuple(addresses)
        self._interval_seconds = interval_seconds
        self._timeout_seconds = timeout_seconds
        self._status = {each.key.name: SubmitterStatus(each.key.name, 0, 0, "") for each in addresses}
        self._stop = threading.Event()
        self._threads: list[GuardingThread] = []

    def status(self) -> tuple[SubmitterStatus, ...]:
        """Return a snapshot, in the order of the addresses."""
        return tuple(self._status[each.key.name] for each in self._addresses)

    def submit_once(self, address: WitnessAddress) -> int:
        """Have the newest signed checkpoint witnessed; return its size (0: nothing is signed yet).

        Raises `WitnessError` and what the database raises.
        """
        name = address.key.name
        with self._engine.connect() as connection:
            proofs = LedgerProofs(connection)
            note = proofs.signed_or_none()
            mine = cosignatures.c.witness == name
            seen = connection.scalar(select(func.max(cosignatures.c.size)).where(mine)) or 0
        if note is None or seen == note.size:
            return seen
        made = cosign(address, note.note, note.size, seen, self._prove, timeout_seconds=self._timeout_seconds)
        self._store(name, note.size, made)
        return note.size

    def start(self) -> None:
        """Start one thread for each witness (rule 1)."""
        for address in self._addresses:
            thread = GuardingThread(self._run, args=(address,), name=f"kvcustody-witness-{address.key.name}")
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """Stop; wait no longer than one call's deadline."""
        self._stop.set()
        for thread in self._threads:
            thread.join(self._timeout_seconds + 1)

    def _run(self, address: WitnessAddress) -> None:
        failures = 0
        wait: Callable[[float], bool] = self._stop.wait
        while not wait(self._pause_seconds(failures)):
            name = address.key.name
            try:
                size = self.submit_once(address)
            except (LedgerError, SQLAlchemyError) as problem:
                failures += 1
                text = problem.message if isinstance(problem, LedgerError) else describe(problem)
                self._status[name] = self._status[name]._replace(failures=failures, problem=text)
            else:
                failures = 0
                self._status[name] = SubmitterStatus(name, size, 0, "")

    def _pause_seconds(self, failures: int) -> float:
        """Rule 2."""
        longest = min(_WAIT_SECONDS_MAX, self._interval_seconds * 2.0 ** min(failures, 16))
        return longest if not failures else longest * (0.5 + _JITTER.random() / 2)

    def _prove(self, old_size: int, size: int) -> list[bytes]:
        with self._engine.connect() as connection:
            return LedgerProofs(connection).root_consistency(old_size, size)

    def _store(self, name: str, size: int, made: Cosigned) -> None:
        values = {
            "size": size,
            "witness": name,
            "line": made.line.line().encode(),
            "at_us": made.at_seconds * 1_000_000,
        }
        try:
            with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
                connection.execute(insert(cosignatures).values(values))
        except IntegrityError:
            pass  # another process was as quick
