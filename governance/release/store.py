"""Stores of a release's records: a folder of files, or a table beside the ledger.

1. Records are only ever added, each at the next number; two who add at once do not both succeed.
2. A store is not trusted: whoever reads it verifies every signature and the chain (`release.state`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from sqlalchemy import Engine, insert, select
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from kvcustody.audit.store.database.engine import WRITE, ledger_error
from kvcustody.audit.store.schema.releases import policy_release
from kvcustody.files import READABLE, write_file
from kvcustody.governance.release.record import RECORD_BYTES_MAX, ReleaseError, read_record


class ReleaseStore(Protocol):
    """An ordered, append-only list of records, as bytes."""

    def read(self, after: int = 0) -> list[bytes]:
        """Return every record beyond number `after`, in order; raises `CustodyError` where the store does not
        answer.
        """

    def append(self, number: int, data: bytes) -> None:
        """Add the record with this number, durably; raises `ReleaseError` where the number is taken."""


def _taken(number: int) -> ReleaseError:
    return ReleaseError(
        f"step `{number}` of the release was taken by somebody else in the meantime; read the release again and repeat",
        number=number,
    )


class FolderStore:
    """A release folder with `000001.json` and so on. Works without a network or a database."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, after: int = 0) -> list[bytes]:
        """The records; raises `ReleaseError` for a folder that is missing or whose files leave a gap."""
        try:
            names = sorted(path.name for path in self.path.iterdir() if path.name.endswith(".json"))
            records = []
            for number, name in enumerate(names, 1):
                if name != f"{number:06}.json":
                    raise ReleaseError(f"release folder `{self.path}`: `{name}` is out of place, or one is missing")
                if number <= after:
                    continue
                with (self.path / name).open("rb") as file:
                    records.append(file.read(RECORD_BYTES_MAX + 1))
        except OSError as error:
            raise ReleaseError(
                f"release folder `{self.path}`: {error.strerror}; create it with `kvcustody policy trust`"
            ) from None
        return records

    def append(self, number: int, data: bytes) -> None:
        """Write the file durably; creating its link fails where the name is taken."""
        path = self.path / f"{number:06}.json"
        try:
            write_file(path, data, mode=READABLE, exclusive=True)
        except FileExistsError:
            raise _taken(number) from None
        except OSError as error:
            raise ReleaseError(f"release folder `{self.path}`: {error.strerror}") from None


class SqlStore:
    """The table `policy_release` of a ledger's database."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def read(self, after: int = 0) -> list[bytes]:
        """Return the records; raises `LedgerError` where the database does not answer."""
        query = (
            select(policy_release.c.number, policy_release.c.record)
            .where(policy_release.c.number > after)
            .order_by(policy_release.c.number)
        )
        try:
            with self._engine.connect() as connection:
                rows = connection.execute(query).all()
        except SQLAlchemyError as problem:
            raise ledger_error(self._engine, problem) from problem
        if [row.number for row in rows] != list(range(after + 1, after + len(rows) + 1)):
            raise ReleaseError("a record of the release is missing: it was removed from the database")
        return [bytes(row.record) for row in rows]

    def append(self, number: int, data: bytes) -> None:
        """Insert the record in a transaction of its own."""
        record = read_record(data)
        row = {
            "number": number,
            "kind": record.action.value,
            "revision": int(record.body.get("revision", 0)),
            "actor": record.actor,
            "at_us": record.at_us,
            "record": data,
        }
        try:
            with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
                connection.execute(insert(policy_release), [row])
        except IntegrityError:
            raise _taken(number) from None
        except SQLAlchemyError as problem:
            raise ledger_error(self._engine, problem) from problem
